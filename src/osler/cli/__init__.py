"""The command line: one verb a file, and the supervisor that ``osler run`` is. Importing it costs the standard library only.

* ``main`` – parser, exit codes, no traceback of ours
* ``run`` – the verb; ``command`` – which words to start; ``supervisor`` – start, wait, conclude
* ``child`` – the process, its signals and how it ended; ``witness`` – tells signals to us from signals to the whole group
* ``follow`` – polls the store, diagnoses, speaks at once; ``conclude`` – the last word: files, report, exit code
* ``runs``, ``report``, ``export``, ``explain`` – verbs over runs that exist
"""
