"""The history of a run: a row for each logged step, thinned out in a long run."""

Row = dict[str, float]
"""A step, the seconds of training until then, and the metrics that were logged."""

MAX_ROWS = 2**14
"""Rows of one kind that are kept: every checkpoint holds them, and a run may take millions of steps."""


def remember(history: list[Row], row: Row, most: int = MAX_ROWS) -> None:
    """Append a row. From `most` steps on, keep only the first row of every two steps, then of four, of eight …

    A curve thus has at most `most` points, all along the run. Rows with different metrics, such as those of training
    and of validation, count separately. The newest row is always kept. Which rows remain depends on the steps alone.

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
    """Return the index of the first row in the same group of steps as the last row."""
    start = len(history) - 1
    while start > 0 and history[start - 1]["step"] // steps == history[-1]["step"] // steps:
        start -= 1
    return start
