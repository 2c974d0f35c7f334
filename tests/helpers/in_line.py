"""Workers without processes."""

from collections import Counter
from collections.abc import Iterator

from kvt.study.workers import Job, execute


class InLine:
    """Makes a run at once; counts how often each was asked for."""

    workers = 1

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.ended: list[tuple[Job, str]] = []

    free = property(lambda self: not self.ended)

    def start(self, job: Job) -> None:
        self.asked[job.folder.name] += 1
        self.ended.append((job, self.make(job)))

    def make(self, job: Job) -> str:
        """Make a run, and return how its process died."""
        execute(job)
        return ""

    def wait(self, _: float | None) -> Iterator[tuple[Job, str]]:
        while self.ended:
            yield self.ended.pop()

    def close(self) -> None:
        pass
