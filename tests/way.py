"""The functions of kvt between a command line and the first forward pass of its task.

    python tests/way.py --attn kv                 # of `python experiments/cifar.py --attn kv`, with any of its flags
    python tests/way.py --most 30 8 --attn kv     # exits with 1 above 30 functions or 8 files of the rooms in FRONT

A function is counted once, if it has a `def`. The data are a small folder of images, unless you pass --root.
"""

import inspect
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))
FRONT = ("run", "commands.py", "system.py", "tune.py")
entered: dict[str, list[str]] = {}


class Arrived(BaseException):
    """Ends the run at its first forward pass."""


def note(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(f"{REPOSITORY}/kvt/"):
        return
    if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
        names = entered.setdefault(str(Path(code.co_filename).relative_to(REPOSITORY / "kvt")), [])
        if code.co_qualname not in names:
            names.append(code.co_qualname)
        if code.co_name == "forward" and "/kvt/tasks/" in code.co_filename:
            sys.setprofile(None)
            raise Arrived


def main(words: list[str]) -> NoReturn:
    most = [int(words.pop(0)) for _ in range(2)] if words[:1] == ["--most"] and words.pop(0) else [sys.maxsize] * 2
    from tests.conftest import QUIET, SMALL_IMAGES, write_images

    with TemporaryDirectory() as folder:
        write_images(Path(folder, "images"), classes=3, size=32, mode="RGB")
        small = [*SMALL_IMAGES, *QUIET, "--default_root_dir", folder, "--root", f"{folder}/images"]
        sys.argv = ["experiments/cifar.py", *small, *words]
        sys.setprofile(note)
        with suppress(Arrived):
            runpy.run_path(str(REPOSITORY / sys.argv[0]), run_name="__main__")
    front = [len(names) for file, names in entered.items() if file.split("/")[0] in FRONT]
    total = sum(map(len, entered.values()))
    print(f"{sum(front)} functions in {len(front)} files of run, commands, system and tune;", end=" ")
    print(f"{total} in {len(entered)} of kvt")
    for file, names in entered.items():
        print(f"{file}: {len(names)}: {', '.join(names)}")
    sys.exit(sum(front) > most[0] or len(front) > most[1])


if __name__ == "__main__":
    main(sys.argv[1:])
