"""Workers without processes."""

from collections import Counter

from kvt.study.job import Job, execute
from kvt.study.outcomes import Outcome


class InLine:
    """Makes a run at once; counts how often each was asked for."""

    workers = threads = 1

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def make(self, job: Job) -> Outcome:
        self.asked[job.folder.name] += 1
        return execute(job)

    def close(self) -> None:
        pass
