"""Prints what a checkout computes differently from an older commit; exits with 1 if anything differs.

    python tests/same_as.py COMMIT [runs] [configs] [records] [reports]

* runs: tensors of best.ckpt, val/* and test/* of result.json, of a small run of each task with qkv, kv and kv+pos
* configs: the values that `kvt run NAME --print_config` prints
* records: the number and the names of the runs of each grid and scale that each record holds
* reports: the report.md that the checkout writes of each record that the commit has

An environment of the commit, with the installed versions, and what the commit computed stay in build/same_as/COMMIT.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch
import yaml

from tests.conftest import REPOSITORY, write_features, write_images, write_sentences

RECORDS = Path("docs", "results")
LAYERS = "--dim 16 --depth 2 --heads 2"
LISTS = f"{LAYERS} --train_size 640 --val_size 100 --test_size 100 --batch_size 32 --max_epochs 2"
TEXT = f"{LAYERS} --text {{data}}/text.txt --batch_size 8 --max_steps 20 --val_check_interval 10"
TASKS = {  # flags of `kvt run` by task; {data} is the folder of `write_data`
    "sort": LISTS,
    "mnist": f"{LAYERS} --root {{data}}/images --max_epochs 2 --batch_size 8 --val_size 6",
    "anomaly": f"{LAYERS} --features {{data}}/features.pt --set_size 4 --batch_size 32 --max_epochs 2",
    "characters": f"{TEXT} --length 16",
    "human_numbers": f"{LAYERS} --length 128 --max_epochs 1",
    "language_model": f"{TEXT} --length 24 --val_size 0.3",
    "language_model masked": f"{TEXT} --length 24 --val_size 0.3 --objective masked",
    "translation": f"{LAYERS} --root {{data}}/pairs --batch_size 8 --max_len 12 --max_epochs 2",
    "mqar": f"{LISTS} --vocab 16 --length 12 --pairs 2",
}
ALWAYS = "--accelerator cpu --threads 1 --enable_progress_bar false"
# Runs kvt's command line, each command in a fork of a process that has imported what takes long.
COMMANDS = """
import json, os, runpy, sys, traceback
import kvt.tasks, matplotlib.figure, pandas, scipy.stats
for folder, words in json.load(sys.stdin):
    os.makedirs(folder, exist_ok=True)
    if not (pid := os.fork()):
        try:
            os.chdir(folder)
            for number, name in ((1, "printed"), (2, "errors")):
                os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
            sys.argv = ["kvt", *words]
            runpy.run_module("kvt", run_name="__main__", alter_sys=True)
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    open(f"{folder}/done", "w").close()
"""
NAMES = """
import json
from pathlib import Path
import kvt, yaml
from kvt.study.grid import read_grid
found = {}
for path in sorted(Path(kvt.__file__).parent.glob("grids/*.yaml")):
    for scale in yaml.safe_load(path.read_text()).get("scales", {"full": None}):
        found[f"{path.stem} {scale}"] = [run.name for run in read_grid(path.stem, scale).runs]
print(json.dumps(found))
"""


class Side(NamedTuple):
    """A checkout, the Python that runs it, and the folder for what it computes."""

    root: Path
    python: str
    folder: Path

    def start(self, program: str) -> "subprocess.Popen[str]":
        """Start a Python program with the checkout's kvt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "KVT_DATA_DIR": str(self.folder / "none")}
        words = [self.python, "-c", program]
        return subprocess.Popen(words, cwd=self.folder, env=os.environ | settings, text=True, stdin=-1, stdout=-1)

    def place(self, *names: str) -> Path:
        return self.folder.joinpath(*(name.replace(" ", "-") for name in names))


def call(sides: tuple[Side, ...], commands: dict[Path, list[str]]) -> None:
    """Run commands of kvt, each in its own folder; the sides run at once."""
    missing = {path: words for path, words in commands.items() if not (path / "done").is_file()}
    begun = [(side, side.start(COMMANDS)) for side in sides]
    for side, process in begun:
        assert process.stdin
        own = [(str(path), words) for path, words in missing.items() if path.is_relative_to(side.folder)]
        process.stdin.write(json.dumps(own))
        process.stdin.close()
    for _, process in begun:
        process.wait()


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def write_data(folder: Path) -> None:
    """Write random images, features, words and pairs of sentences."""
    write_images(folder / "images", classes=3, size=28, mode="L")
    write_features(folder / "features.pt", classes=12, width=8, train=40)
    (folder / "text.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    write_sentences(folder / "pairs", {"train": 80, "val": 20, "test": 20})


def older(commit: str, folder: Path) -> Side:
    """Return the commit's side: a worktree, and an environment with the versions that are installed here."""
    root, python = folder / "checkout", folder / "venv" / "bin" / "python"
    if not root.exists():
        git("worktree", "add", "--quiet", "--detach", str(root), commit)
        uv, versions = [sys.executable, "-m", "uv"], folder / "versions.txt"
        frozen = subprocess.run([*uv, "pip", "freeze"], capture_output=True, text=True, check=True).stdout
        versions.write_text("".join(f"{line}\n" for line in frozen.splitlines() if "==" in line))
        subprocess.run([*uv, "venv", "--quiet", str(python.parents[1])], check=True)
        words = ["pip", "install", "--quiet", "--python", str(python), "--constraint", str(versions), "-e", str(root)]
        subprocess.run([*uv, *words], check=True)
    return Side(root, str(python), folder / "made")


def runs(*sides: Side) -> Iterator[str]:
    """Compare tensors and metrics of the runs of `TASKS`."""
    cases = [(task, attention) for task in TASKS for attention in ("qkv", "kv", "kv+pos")]
    data = sides[0].folder.parent / "data"
    commands = {}
    for task, attention in cases:
        words = f"run {task.split()[0]} --attn {attention} {TASKS[task]} {ALWAYS}".format(data=data).split()
        commands |= {side.place(task, attention): words for side in sides}
    call(sides, commands)

    def result(folder: Path) -> dict[str, Any]:
        if not (found := [*folder.rglob("result.json")]):
            return {"failed": f"{folder}: {(folder / 'errors').read_text()}"}
        metrics = json.loads(found[0].read_text())
        (best,) = folder.rglob("best.ckpt")
        tensors = torch.load(best, weights_only=True, map_location="cpu")["state_dict"]
        return {name: value for name, value in metrics.items() if name.startswith(("val/", "test/"))} | tensors

    yield from differences(*({" ".join(case): result(side.place(*case)) for case in cases} for side in sides))


def configs(*sides: Side) -> Iterator[str]:
    """Compare the values of each task's YAML file, as `--print_config` prints them."""
    names = {side: sorted(path.stem for path in side.root.glob("kvt/configs/*.yaml")) for side in sides}
    place = {(side, name): side.place("configs", name) for side in sides for name in names[side]}
    call(sides, {path: ["run", name, "--print_config"] for (_, name), path in place.items()})

    def values(folder: Path) -> dict[str, Any]:
        printed = yaml.safe_load((folder / "printed").read_text())
        return dict(flat(printed)) if isinstance(printed, dict) else {"errors": (folder / "errors").read_text()}

    yield from differences(*({name: values(place[side, name]) for name in names[side]} for side in sides))


def records(*sides: Side) -> Iterator[str]:
    """Compare the runs of each grid and scale that each record holds."""

    def held(side: Side) -> dict[str, Any]:
        grids = json.loads(side.start(NAMES).communicate()[0])
        found: dict[str, Any] = {}
        for table in sorted(side.root.joinpath(RECORDS).glob("*/results.csv")):
            names = {line.split(",", 1)[0] for line in table.read_text().splitlines()[1:]}
            found[table.parent.name] = {
                grid: f"{len(names.intersection(runs))} runs, {checksum(names.intersection(runs))}"
                for grid, runs in grids.items()
                if table.parent.name.startswith(f"{grid.split()[0]}-")
            }
        return found

    yield from differences(*map(held, sides))


def reports(_: Side, side: Side, commit: str) -> Iterator[str]:
    """Compare the reports that the checkout writes with those of the commit."""
    grids = sorted((path.stem for path in side.root.glob("kvt/grids/*.yaml")), key=len, reverse=True)
    listed = git("ls-tree", "-r", "--name-only", commit, str(RECORDS)).splitlines()
    names = [Path(path).parent.name for path in listed if path.endswith("/report.md")]
    commands = {}
    for name in names:
        grid = next(grid for grid in grids if name.startswith(f"{grid}-"))
        scale, record = name.removeprefix(f"{grid}-"), side.root / RECORDS / name
        others = record.parent.glob(f"{grid}-*/results.csv") if scale == "paper" else ()
        sources = dict.fromkeys([str(record), *sorted(str(path.parent) for path in others)])
        words = ["study", "report", grid, "--scale", scale, "--out", "out", "--from", *sources]
        commands[side.place("reports", name)] = words
    call((side,), commands)
    for name, folder in zip(names, commands, strict=True):
        if not (written := folder / "out" / "report.md").is_file():
            yield f"{name}: {(folder / 'errors').read_text()}"
            continue
        old = git("show", f"{commit}:{RECORDS / name / 'report.md'}").splitlines()
        new = written.read_text().splitlines()
        yield from (f"{name}: {line}" for line in unified_diff(old, new, n=0, lineterm=""))


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dictionaries with their dotted keys."""
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, values


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each key of two dictionaries of dictionaries whose values differ, or that only one has."""
    both = [name for name in old if name in new]
    for word, here, there in (("the commit", old, new), ("the checkout", new, old)):
        yield from (f"{name}: only in {word}" for name in here if name not in there)
        for key in dict.fromkeys(key for name in both for key in here[name]):
            if names := [name for name in both if key in here[name] and key not in there[name]]:
                yield f"{key}: only in {word}, in {len(names)}: {', '.join(names)}"
    for name in both:
        for key in [key for key in old[name] if key in new[name]]:
            a, b = old[name][key], new[name][key]
            tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            if not (torch.equal(a, b) if tensors else a == b or (a != a and b != b)):
                yield f"{name}: {key}: " + ("tensors differ" if tensors else f"{a} -> {b}"[:300])


def checksum(names: set[str]) -> str:
    return hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:12]


def main() -> int:
    """Compare the checkout with a commit; return the exit code."""
    commit = git("rev-parse", "--short", sys.argv[1]).strip()
    folder = REPOSITORY / "build" / "same_as" / commit
    if not (folder / "data").exists():
        write_data(folder / "data")
    then, now = older(commit, folder), Side(REPOSITORY, sys.executable, folder / "now")
    rmtree(now.folder, ignore_errors=True)
    parts = {"runs": runs, "configs": configs, "records": records}
    count = 0
    for part in sys.argv[2:] or [*parts, "reports"]:
        lines = [*(reports(then, now, commit) if part == "reports" else parts[part](then, now))]
        print(f"== {part}: {len(lines)} differences from {commit}", *lines, sep="\n", flush=True)
        count += len(lines)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
