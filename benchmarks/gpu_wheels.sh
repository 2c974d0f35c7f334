#!/usr/bin/env bash
# Packs all that a GPU machine without a network needs into FOLDER.tar.gz, one archive: the checkout as committed, without
# records and zoo, and in wheels/ what kvt and its tests need and gpu_machine.txt lacks, which lie in a new folder, too:
#   benchmarks/gpu_wheels.sh FOLDER                                                  # here; needs uv and pip
#   tar -xf FOLDER.tar.gz && cd kvt                                                  # there
#   python -m pip install --no-index --no-deps --target packages wheels/*.whl
#   PYTHONPATH=.:packages python benchmarks/gpu.py
# Fails if the wheels have more than 60 MB.
set -euo pipefail

limit=60000000
folder=$(realpath -m "${1:?usage: benchmarks/gpu_wheels.sh FOLDER}")
mkdir "$folder" # fails if it exists: two versions of a wheel cannot be installed
checkout=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # pip prefers what lies in the working directory

pins() { # what requirements come to there, a "name==version" a line, as if installed together with all of kvt's
  uv pip compile --quiet --no-header --no-annotate --python-version 3.12 --python-platform x86_64-manylinux_2_28 "$@" | sort
}

cp "$checkout/benchmarks/gpu_machine.txt" there.in
printf 'spacy<3.8.15\nblis<1.3.4\n' >small.txt # later wheels have 5 MB more
pins there.in "$checkout/pyproject.toml" --extra test --constraint small.txt >all.txt
pins there.in --constraint all.txt >there.txt
comm -23 all.txt there.txt >missing.txt

platforms=()
for glibc in 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 "${platforms[@]}" \
  --platform manylinux2014_x86_64 --dest "$folder" --requirement missing.txt

size=$(cat "$folder"/*.whl | wc -c)
echo "$(wc -l <missing.txt) wheels, $size bytes"
[ "$size" -le "$limit" ] || { echo "error: more than $limit bytes" >&2; exit 1; }

mkdir kvt
git -C "$checkout" archive HEAD -- . ':(exclude)docs/results' ':(exclude)zoo' | tar -x -C kvt
cp -r "$folder" kvt/wheels
tar -czf "$folder.tar.gz" kvt
echo "$folder.tar.gz: $(stat -c %s "$folder.tar.gz") bytes"
