"""An engine without processes."""

from collections import Counter
from collections.abc import Sequence

from kvt.study.run import Job, Outcomes, execute_all


class InLine:
    """Executes jobs in `wait`; counts how often each was submitted, and keeps the sizes of the groups."""

    workers = 1

    def __init__(self) -> None:
        self.jobs: Sequence[Job] = ()
        self.asked: Counter[str] = Counter()
        self.sizes: list[int] = []

    busy = property(lambda self: bool(self.jobs))
    room = property(lambda self: not self.jobs)

    def submit(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.asked.update(job.folder.name for job in jobs)
        self.sizes.append(len(jobs))

    def wait(self, seconds: float | None = None) -> Outcomes:
        jobs, self.jobs = self.jobs, ()
        return execute_all(jobs)

    def close(self) -> None:
        pass
