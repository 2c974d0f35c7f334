"""Measure a GPU in one call: is kvt right there, how fast is it, how many runs does it make an hour?

`--out` holds report.md, a table for each part, the most telling first, which is rewritten with each row; log.txt with
tracebacks; and a record of Table 2. The same command goes on where it stopped: with the rows that are missing or have
failed. Each part runs in a process of its own, which is killed when its share of `--minutes` is over: the others have
theirs, whatever happens to one. The exit code is 0 once everything is there, and right.

`--device cpu` rehearses it all at a tiny size. benchmarks/gpu_wheels.sh says how to use a machine without a network.
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
    """Measure the rows of a part that are not done, and send each; at last send what is wrong with the whole part."""
    os.setsid()  # so that all processes that it starts can be killed at once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it would be ignored after `gpu.py &`, by tests, too
    os.environ["TMPDIR"] = tempfile.tempdir = scratch  # where a compiler that is killed may leave half a file
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
    """Measure what is missing of some parts, until `ends`; each shares the time that is left with the later ones."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["gpu_checks", "gpu_runs", "gpu_steps"])  # imported once, for all parts
    first = context.Process(target=os.getpid)
    first.start()
    first.join()  # now they are imported, in no part's time
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
    """Kill a process and all that it has started."""
    assert pid is not None
    for end in (os.killpg, os.kill):  # the second one before it has a group of its own
        with suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def main(argv: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="after which it ends (default: %(default)s)")
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
    # for the processes of all parts, some of which run in other folders
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
    measure([name for name in parts if name in asked.parts], report, asked.device, out, ends)
    print(asked.out / "report.md")
    return 0 if all(map(report.is_complete, asked.parts)) else 1


if __name__ == "__main__":
    sys.exit(main())
