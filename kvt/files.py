"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write, which takes its place at the end; after an error there is none.

    A killed process leaves at most that other file, named *.tmp.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
