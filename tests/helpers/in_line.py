"""An engine without processes."""

from collections import Counter

from kvt.study.job import Job, execute
from kvt.study.workers import Ended


class InLine:
    """Executes a job in `wait`; counts how often each was submitted."""

    workers = 1

    def __init__(self) -> None:
        self.job: Job | None = None
        self.asked: Counter[str] = Counter()

    busy = property(lambda self: self.job is not None)
    room = property(lambda self: self.job is None)

    def submit(self, job: Job) -> None:
        self.job = job
        self.asked[job.folder.name] += 1

    def wait(self, seconds: float | None = None) -> Ended:
        job, self.job = self.job, None
        return job, execute(job)

    def close(self) -> None:
        pass
