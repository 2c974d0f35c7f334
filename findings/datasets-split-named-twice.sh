#!/usr/bin/env bash
# datasets reads a Parquet file twice if its name has the split's name twice, such as train-train.parquet.
#
# Expected: load_dataset reads each row of each file of a folder once.
# Real: file names are matched against several patterns (split at the beginning, in the middle, at the end), and a file that fits two of
#   them is listed twice. Two rows become four, without a warning. An epoch then has these rows twice, and a random split into
#   training and validation rows has the same rows in both parts.
#
# Python 3.11.7, datasets 5.2.0, pyarrow 25.0.1. Seen on 2026-11-27:
#   train.parquet: [0, 1]
#   train-train.parquet: [0, 1, 0, 1]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==25.0.1
export HF_HOME="$work/cache" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset

said = {}
for name in ("train", "train-train"):
    Path(name).mkdir()
    pq.write_table(pa.table({"x": [0, 1]}), f"{name}/{name}.parquet")
    said[name] = load_dataset(str(Path(name).resolve()))["train"]["x"][:]
    print(f"{name}.parquet: {said[name]}")

assert said["train"] == [0, 1]
assert said["train-train"] == [0, 1, 0, 1], "this finding is out of date"
PYTHON
