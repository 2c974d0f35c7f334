"""`kvt runs`, `kvt runs rm` and `kvt show`: list, remove and describe the runs in folders."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvt.system.console import quick_imports, tell
from kvt.system.errors import UserError
from kvt.system.files import require_folder, user_path
from kvt.system.quoting import printable

if TYPE_CHECKING:
    from kvt.reports.stored_runs import StoredRun

NOTHING: list[str] = []


def runs(
    *folders: str,
    task: str | None = None,
    attn: str | None = None,
    where: list[str] = NOTHING,
    sort: str = "when",
    plot: bool = False,
    out: str = "runs.png",
) -> None:
    """List the runs in folders: score, settings that differ among runs, seconds of training, date, and size on disk.

    The score is BLEU, bits per byte, accuracy or loss on the test split, or on the validation split of an untested run.
    In a narrow terminal, the last columns are left out and long paths are shortened. Run and score are always shown.

    Args:
        folders: folders to search; default: lightning_logs.
        task: list only runs of this task, such as reverse.
        attn: list only runs with this attention.
        where: list only runs with these settings, such as dim=64 lr=0.001.
        sort: column to sort by: run, score, seconds, when or size; or a metric such as test/acc, which then replaces
            the score. The largest value of a column is last. The best score or metric is last.
        plot: also draw the validation curves of the runs.
        out: path of the picture, .png, .pdf or .svg.
    """
    with quick_imports():
        from kvt.reports.stored_runs import WIDTH, draw, find_runs, list_of, select

        if plot:
            from kvt.view import maps as plots

    path = plots.require_ending(user_path(out), plots.FORMATS) if plot else None
    places = [user_path(folder) for folder in folders or ("lightning_logs",)]
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place}: no such folder: pass one with runs, such as lightning_logs")
    every = {run.folder: run for place in places for run in find_runs(place)}  # without duplicates
    selected = select([*every.values()], task, attn, where)
    if not selected:
        raise UserError(f"no such runs in {', '.join(map(str, places))}")
    tell(list_of(selected, sort, shutil.get_terminal_size((WIDTH, 0)).columns))
    if path:
        plots.save(draw(selected), path)
        tell(printable(path))


def runs_rm(*folders: str, yes: bool = False) -> None:
    """Remove runs, and all runs inside the folders of these runs, after a confirmation.

    Args:
        folders: folders of the runs, such as lightning_logs/reverse/kv/version_0.
        yes: remove the runs without a confirmation.
    """
    with quick_imports():
        from kvt.reports.stored_runs import find_runs, list_of, megabytes
        from kvt.run.folder import IN_USE, is_in_use

    paths = [*dict.fromkeys(map(_removable, _required(folders)))]
    inside = [*{run.folder: run for path in paths for run in find_runs(path)}.values()]
    if used := [run.folder for run in inside if is_in_use(run.folder)]:
        raise UserError(f"{used[0]}: {IN_USE}")
    tell(list_of(inside, "when"))
    size = sum(run.size for run in inside if run.folder in paths)
    if yes or _answer(f"remove {len(inside)} run{'s' * (len(inside) > 1)}, {megabytes(size)}? [y/N] "):
        for path in paths:
            if path.exists():  # the folder may have been inside a folder that is already removed
                shutil.rmtree(path)
    else:
        tell("nothing was removed")


def show(*folders: str) -> None:
    """Print the settings of a run that are not defaults of its task, its result, and commands that use the run.

    Args:
        folders: folders of runs, such as lightning_logs/reverse/kv/version_0.
    """
    stored = [_read(folder) for folder in _required(folders)]
    with quick_imports():
        from kvt.reports.stored_runs import card

    tell("\n\n".join(map(card, stored)))


def _required(folders: tuple[str, ...]) -> tuple[str, ...]:
    if not folders:
        raise UserError("pass the folder of a run: kvt runs lists them")
    return folders


def _removable(named: str) -> Path:
    """Return the resolved path of a run's folder; raise UserError unless kvt has written the folder."""
    run = _read(named)
    if Path(run.path).is_symlink():
        raise UserError(f"{named}: is a link: pass the folder that it leads to, {run.folder}")
    if not run.config:
        raise UserError(f"{named}: cannot tell that this is a run of kvt ({run.outcome.message}): remove it by hand")
    require_folder(run.folder.parent, "kvt runs rm")
    return run.folder


def _read(folder: str) -> "StoredRun":
    with quick_imports():
        from kvt.reports.stored_runs import read_run
        from kvt.run.folder import run_folder

    return read_run(run_folder(folder))


def _answer(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, RuntimeError):  # raised if standard input has ended or is closed
        return False
