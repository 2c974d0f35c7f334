"""The wheel and the source distribution hold the package that git knows, what describes it, and nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

LARGEST = 1_000_000
"""Bytes of either: code is small, data are not."""

folder = Path(sys.argv[1])
[wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
name = source.name.removesuffix(".tar.gz")
package = {*subprocess.check_output(["git", "ls-files", "kvt"], text=True).split()}
with zipfile.ZipFile(wheel) as archive:
    held = {*archive.namelist()}
    metadata = archive.read(f"{name}.dist-info/METADATA").decode()
described = {file for file in held if file.startswith(f"{name}.dist-info/")}
assert held - described == package, (held - described) ^ package
assert f"{name}.dist-info/licenses/LICENSE" in described
assert "License-Expression: MIT\n" in metadata

with tarfile.open(source) as archive:
    held = {file.name.removeprefix(f"{name}/") for file in archive if file.isfile()}
described = {file for file in held if file.startswith("kvt.egg-info/")}
package |= {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
assert held - described == package, (held - described) ^ package

for path in (wheel, source):
    assert path.stat().st_size < LARGEST, f"{path.name}: {path.stat().st_size} bytes"
    print(f"{path.name}: {path.stat().st_size} bytes")
