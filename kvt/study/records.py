"""What a run that has ended leaves in its folder, read with suspicion: its result and its history."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvt.training import results

Result = dict[str, Any]
"""The content of result.json."""

RESULT, HISTORY = "result.json", "history.csv"
NUMBER = int | float
KINDS: Mapping[str, Any] = {
    "config": dict,
    "seed": int,
    "parameters": int,
    "seconds": NUMBER,
    "started": str,
    "finished": str,
    "machine": dict,
    "packages": dict,
    "precision": str,
    "commit": str | None,
}
"""What a result must hold to be one."""
OTHER_KINDS: Mapping[str, Any] = {"fleet": int | None, "diverged": str, "notes": dict}
"""What it may hold; and metrics, each a number, with a slash in its name."""
KINDS_OF_MACHINE: Mapping[str, Any] = {"processor": str, "system": str, "threads": int, "gpus": list}
MAX_SECONDS = 1e9
"""Seconds that no run takes, three decades."""


class DamagedError(ValueError):
    """Something is there, but no run has written it: the message says what is wrong."""


def read_result(folder: Path) -> Result | None:
    """The result of the run in this folder; None where there is none.

    Raises:
        DamagedError: the file is no JSON, or lacks something, or holds something of another type.
    """
    if not _is_file(folder / RESULT):
        return None
    result = results.read_json(folder / RESULT)
    if result is None:
        raise DamagedError(f"{RESULT} cannot be read as a JSON object")
    metrics = {name: NUMBER for name in result if "/" in name}
    _require(result, KINDS, {**OTHER_KINDS, **metrics})
    _require(result["machine"], KINDS_OF_MACHINE)
    if not all(isinstance(gpu, str) for gpu in result["machine"]["gpus"]):
        raise DamagedError(f"{RESULT}: gpus are no names")
    try:
        sensible = 0 <= result["seconds"] <= MAX_SECONDS and seconds_of(result) <= MAX_SECONDS
    except (ValueError, TypeError) as error:  # of a time with a zone and one without there is no difference
        raise DamagedError(f"{RESULT}: started and finished are no two times") from error
    if not sensible:
        raise DamagedError(f"{RESULT}: its seconds are not those of a run")
    return result


def read_history(folder: Path) -> pd.DataFrame | None:
    """The history of the run in this folder; None where there is none.

    Raises:
        DamagedError: the file is no table of numbers with the columns step and seconds.
    """
    if not _is_file(folder / HISTORY):
        return None
    try:
        history = pd.read_csv(folder / HISTORY, dtype=float)
    except (OSError, ValueError, OverflowError) as error:  # pandas' own are all of these
        raise DamagedError(f"{HISTORY} cannot be read as a table of numbers") from error
    if not {"step", "seconds"} <= {*history} or not len(history):
        raise DamagedError(f"{HISTORY} has no steps")
    if not np.isfinite(history[["step", "seconds"]]).all(axis=None):
        raise DamagedError(f"{HISTORY} has steps without a time")
    return history


def seconds_of(result: Mapping[str, Any]) -> float:
    """From the start of a run to its end; where it was interrupted, at least its training; of a fleet its share."""
    started, finished = (datetime.fromisoformat(result[name]) for name in ("started", "finished"))
    return max((finished - started).total_seconds(), float(result["seconds"])) / fleet_of(result)


def fleet_of(result: Mapping[str, Any]) -> int:
    """How many runs share the seconds of a result."""
    return max(1, result.get("fleet") or 1)


def _is_file(path: Path) -> bool:
    """Whether there is a file.

    Raises:
        DamagedError: there is something else.
    """
    try:
        path.lstat()
    except OSError:
        return False
    if not path.is_file():
        raise DamagedError(f"{path.name} is no file")
    return True


def _require(content: Mapping[str, Any], kinds: Mapping[str, Any], others: Mapping[str, Any] = {}) -> None:
    """Makes sure that a mapping holds what it must, and that what it must or may hold is of its type.

    Raises:
        DamagedError: it does not.
    """
    if missing := [name for name in kinds if name not in content]:
        raise DamagedError(f"{RESULT} lacks {missing[0]}")
    for name, kind in {**kinds, **others}.items():
        value = content.get(name)
        fits = name not in content or (isinstance(value, kind) and not isinstance(value, bool))
        if not fits or (isinstance(value, int) and abs(value) >= 2**63):
            raise DamagedError(f"{RESULT}: {name} is no {getattr(kind, '__name__', kind)}")
