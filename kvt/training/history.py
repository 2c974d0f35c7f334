"""What a run remembers of its metrics: a row a step that was logged; of a long run, one of several."""

Row = dict[str, float]
"""A step, the seconds of training up to it, and the metrics that were logged after it."""

MAX_ROWS = 2**14
"""Rows of one kind that are remembered: each checkpoint holds them all, and a run may take millions of steps."""


def remember(history: list[Row], row: Row, most: int = MAX_ROWS) -> None:
    """Adds a row. From `most` steps on a run forgets: of two steps, then of four, of eight …, the first row is left.

    So a curve has points all along the run, at most `most`. Rows with other metrics are a curve of their own,
    as those of validations are. The newest row is always there. What is forgotten depends on nothing but the steps.

    >>> history = []
    >>> for step in range(1, 20):
    ...     remember(history, {"step": step}, most=8)
    >>> [int(row["step"]) for row in history]
    [1, 4, 8, 12, 16, 19]
    """
    if history:
        steps, before = (1 << (int(last["step"]) // most).bit_length() for last in (row, history[-1]))
        start = _start_of_last(history, steps) if steps == before else 0
        first: dict[tuple[float, frozenset[str]], Row] = {}
        for old in history[start:]:
            first.setdefault((old["step"] // steps, frozenset(old)), old)
        history[start:] = first.values()
    history.append(row)


def _start_of_last(history: list[Row], steps: int) -> int:
    """Where the rows begin that are in the same so many steps as the last one."""
    start = len(history) - 1
    while start > 0 and history[start - 1]["step"] // steps == history[-1]["step"] // steps:
        start -= 1
    return start
