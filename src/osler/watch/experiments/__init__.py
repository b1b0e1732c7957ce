"""Experiments in a forked copy of the training process: questions that no record of the run can settle.

``start(capture)`` forks and returns a ``Job``; ``job.poll()`` gives the payloads of ``experiment`` facts (``docs/internals/facts.md``) once
the copy has ended. The real run's numbers, signals, files and output stay as they are.
"""

from osler.watch.experiments.capture import Capture, obstacle
from osler.watch.experiments.job import Job, start

__all__ = ["Capture", "Job", "obstacle", "start"]
