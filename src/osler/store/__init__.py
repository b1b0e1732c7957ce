"""The run directory: append, read, pyramid, export. Standard library and numpy only (pyarrow for Parquet, on demand).

::

    osler-runs/2026-11-30-131500-train-a1b2/
        run.json  end.json                   the supervisor's: what was started, how it ended
        rank-0000/                           one process; a later process of the same rank: rank-0000.attempt-2
            store.json                       schema and rows per segment
            steps-0000.npy steps-0001.npy    rows of a stream, see osler.core.signals
            steps.pyramid-1-0000.npy         bands of 16 rows (level 2: of 256, level 3: of 4096, ...)
            facts.jsonl                      one fact a line
            trace-0000.json                  one recorded stretch of the program
            sources.jsonl  sources/          the user's own files

* ``writer`` – inside the training process: a cheap front and a thread that owns the files (``disk``, ``segments``)
* ``codec`` – values to bytes: rows by ``struct``, facts by ``json``
* ``pyramid`` – the arithmetic of min/max/mean bands
* ``reader`` – the other side: windows of a live or finished run (``rank``, ``tail``)
* ``runs`` – where runs live, their names, which are pruned
* ``export`` – Parquet, CSV, SQLite
"""
