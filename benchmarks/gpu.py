"""Test and measure kvt on a GPU: correctness, speed of training steps and decoding, and runs per hour.

The folder `--out` gets report.md with a table for each part, log.txt with tracebacks, and a record of Table 2. The
report is rewritten after each row, and the most important parts come first. The same command continues after a stop: it
measures the rows that are missing or have failed. Each part runs in its own process, which is killed at the end of its
share of `--minutes`, so that the other parts keep their time. The exit code is 0 once all parts are complete and right.

`--device cpu` is a rehearsal with tiny sizes. benchmarks/gpu_wheels.sh explains how to use a machine without a network.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

import torch
from gpu_checks import ACCURACY, RESUME, TESTS
from gpu_report import CHECKOUT, Case, Part, Report, Setting, failure, is_done
from gpu_runs import DECODING, PROCESSES, TABLE2
from gpu_steps import KERNELS, PEAK, STEPS

from kvt.bench.table import machine
from kvt.system.console import silence_libraries
from kvt.system.hardware import tune

PARTS = {
    "accuracy": ACCURACY,
    "exact resume": RESUME,
    "tests": TESTS,
    "peak": PEAK,
    "training steps": STEPS,
    "attention kernels": KERNELS,
    "processes": PROCESSES,
    "decoding": DECODING,
    "table 2": TABLE2,
}


def work(part: Part, name: str, setting: Setting, scratch: str, answers: Connection) -> None:
    """Measure the rows of a part that are not done, and send each row; then send the part's error, "" for none."""
    os.setsid()  # a process group, so that all processes of the part can be killed at once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # after `gpu.py &`, the part and its tests would ignore it
    os.environ["TMPDIR"] = tempfile.tempdir = scratch  # a compiler that is killed may leave an incomplete file there
    with (setting.out / "log.txt").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    silence_libraries()
    tune()
    problem = ""
    try:
        done = [row for row in setting.rows.get(name, ()) if is_done(row)]
        for key, measure in part.cases(setting):
            if not any(row[: len(key)] == key for row in done):
                answers.send((key, _measured(Case(key, measure))))
    except Exception as error:
        problem = failure(error)
    answers.send(problem)


def _measured(case: Case) -> tuple[str, ...]:
    try:
        return tuple(case.measure())
    except Exception as error:
        return (failure(error),)


def measure(names: Sequence[str], report: Report, device: str, out: Path, ends: float) -> None:
    """Measure the missing rows of some parts until `ends`; the remaining time is divided among the remaining parts."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["gpu_checks", "gpu_runs", "gpu_steps"])  # imported once, for all parts
    first = context.Process(target=os.getpid)
    first.start()
    first.join()  # the modules are imported now, before the time of the first part begins
    parts, todo = report.parts, [name for name in names if not report.is_complete(name)]
    for place, name in enumerate(todo):
        now, shares = monotonic(), [parts[later].share for later in todo[place:]]
        setting = Setting(device, out, now + max(0, ends - now) * shares[0] / sum(shares), report.rows)
        answers, theirs = context.Pipe(duplex=False)
        problem: str | None = None
        report.status[name] = "not complete: interrupted; the same command goes on"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            process = context.Process(target=work, args=(parts[name], name, setting, scratch, theirs))
            process.start()
            theirs.close()
            try:
                while problem is None and answers.poll(max(0, setting.ends - monotonic())):
                    if isinstance(answer := answers.recv(), str):
                        problem = answer
                    else:
                        report.add(name, *answer)
                        report.write()
            except EOFError:
                process.join()
                problem = f"its process died with exit code {process.exitcode}"
            finally:
                _kill(process.pid)
                process.join()
        report.end(name, "its time was up" if problem is None else problem)
        report.write()
        print(f"{name}: {report.status[name]}", flush=True)


def _kill(pid: int | None) -> None:
    """Kill a process and all processes that it has started."""
    assert pid is not None
    for end in (os.killpg, os.kill):  # os.kill ends a process that has not called os.setsid yet
        with suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def main(argv: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="total time in minutes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/gpu"), help="folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts], help="default: all")
    asked = parser.parse_args(argv)
    ends = monotonic() + 60 * asked.minutes
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU: choose --device cpu")
    out: Path = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    tune()
    here = f"# kvt on {machine(asked.device)}"
    report = Report(out / "report.md", here, parts)
    if report.machine != here:
        parser.error(f"--out {asked.out}: has numbers of another machine ({report.machine[2:]}): choose another folder")
    paths = [str(CHECKOUT), str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # absolute paths, because processes of some parts run in other folders
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
    measure([name for name in parts if name in asked.parts], report, asked.device, out, ends)
    print(asked.out / "report.md")
    return 0 if all(map(report.is_complete, asked.parts)) else 1


if __name__ == "__main__":
    sys.exit(main())
