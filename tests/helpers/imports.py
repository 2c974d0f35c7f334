"""What a process imports when it makes a run."""

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from kvt.run.config import RunConfig
from kvt.study.job import Job, execute


def imported_by(config: RunConfig, answer: Connection) -> None:
    """Make a run in the current folder; send its state, and the modules that were imported meanwhile."""
    before = {*sys.modules}
    outcome = execute(Job(config, Path("sort", "kv", "run").resolve(), "data"))
    answer.send([outcome.state, *sorted(sys.modules.keys() - before)])
