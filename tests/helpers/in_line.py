"""An engine without processes."""

from collections import Counter
from collections.abc import Sequence

from kvt.study.fleets import execute_all
from kvt.study.run import Job, Outcomes


class InLine:
    """Makes a group of jobs in `wait`; counts how often each job was submitted, and the sizes of the groups."""

    workers = 1

    def __init__(self) -> None:
        self.jobs: Sequence[Job] = ()
        self.asked: Counter[str] = Counter()
        self.sizes: list[int] = []

    @property
    def room(self) -> bool:
        return not self.jobs

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def submit(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.asked.update(job.folder.name for job in jobs)
        self.sizes.append(len(jobs))

    def wait(self, seconds: float | None = None) -> Outcomes:
        jobs, self.jobs = self.jobs, ()
        return execute_all(jobs)

    def close(self) -> None:
        pass
