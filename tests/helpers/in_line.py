"""An engine without processes."""

from collections import Counter

from kvt.study.run import Job, execute


class InLine:
    """Makes a job, or a fleet, when it is waited for; knows how often each was asked for, and how many at once."""

    workers = 1

    def __init__(self) -> None:
        self.job: Job | None = None
        self.asked: Counter[str] = Counter()
        self.sizes: list[int] = []

    @property
    def room(self) -> bool:
        return self.job is None

    @property
    def busy(self) -> bool:
        return self.job is not None

    def submit(self, job: Job) -> None:
        self.job = job
        self.asked[job.folder.name] += 1
        self.sizes.append(1 + len(job.others))

    def wait(self, seconds: float | None = None):
        job, self.job = self.job, None
        return job, execute(job)

    def stop(self) -> None:
        pass
