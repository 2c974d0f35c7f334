"""Known holes in what is installed: fails if pip-audit finds any, and says so where it could not look.

Takes pip-audit's flags, such as `--path SITE_PACKAGES`.
"""

import json
import subprocess
import sys

asked = subprocess.run(
    ["pip-audit", "--format", "json", "--progress-spinner", "off", *sys.argv[1:]], capture_output=True, text=True
)
if not asked.stdout:
    if "Connection" not in asked.stderr:
        sys.exit(asked.stderr)
    print(f"not audited: {asked.stderr.splitlines()[-1]}")
    sys.exit()
packages = json.loads(asked.stdout)["dependencies"]
unknown = [package["skip_reason"] for package in packages if "skip_reason" in package]
if unknown:  # pip-audit itself calls it success, even if the service knows no package at all
    print(f"not audited: {len(unknown)} of {len(packages)} packages, such as: {unknown[0]}")
found = [
    f"{package['name']} {package['version']}: {hole['id']}, closed in {' or '.join(hole['fix_versions']) or 'none'}"
    for package in packages
    for hole in package.get("vulns", [])
]
print(f"audited: {len(packages) - len(unknown)} packages, {len(found)} known holes", *found, sep="\n")
sys.exit(bool(found))
