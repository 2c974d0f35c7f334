#!/usr/bin/env bash
# A tqdm progress bar starts a second Python process where multiprocessing does not start processes by fork.
#
# Expected: a bar in a program with one process prints, and starts nothing.
# Real: the first bar makes a lock of multiprocessing. With the start methods "forkserver", the default on Linux since
#   Python 3.14, and "spawn", the default on macOS, such a lock is a named semaphore, and Python starts a process that
#   tracks it. If the program is killed, this process prints a warning of a leaked semaphore. A child process that nobody
#   expects also confuses programs that look for their children. tqdm.set_lock(threading.RLock()) before the first bar
#   prevents all this.
#
# Python 3.11.7, tqdm 4.70.1. Seen on 2026-11-28:
#   fork: 0 children; after a kill: no warning
#   forkserver: 1 child; after a kill: "There appear to be 1 leaked semaphore objects"
#   forkserver, set_lock: 0 children; after a kill: no warning
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tqdm==4.70.1
cd "$work"
cat >bar.py <<'PYTHON'
import multiprocessing
import os
import signal
import sys
import threading

from tqdm import tqdm

method, *own = sys.argv[1:]
multiprocessing.set_start_method(method)
if own:
    tqdm.set_lock(threading.RLock())
for _ in tqdm(range(1), disable=True):
    pass
with open("/proc/thread-self/children") as file:
    print(len(file.read().split()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
PYTHON
"$work/venv/bin/python" - <<'PYTHON'
import subprocess
import sys

found = []
for words in (["fork"], ["forkserver"], ["forkserver", "set_lock"]):
    ended = subprocess.run([sys.executable, "bar.py", *words], capture_output=True, text=True)
    children, warned = int(ended.stdout), "There appear to be 1 leaked semaphore objects" in ended.stderr
    warning = '"There appear to be 1 leaked semaphore objects"' if warned else "no warning"
    print(f"{', '.join(words)}: {children} {'child' if children == 1 else 'children'}; after a kill: {warning}")
    found.append((children, warned))
assert found == [(0, False), (1, True), (0, False)], "this finding is out of date"
PYTHON
