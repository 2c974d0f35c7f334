"""The YAML files that come with the package: a configuration of each task, a grid of each table and figure."""

import os
from pathlib import Path

from kvt.system.files import user_path

PACKAGE = Path(__file__).parents[1]
CONFIGS = PACKAGE / "configs"
GRIDS = PACKAGE / "grids"


def find_yaml(named: str, folder: Path) -> Path:
    """Return the path that the user names, or the package's file of that name: cifar10 is configs/cifar10.yaml.

    A file of the user's comes first. One that does not exist is returned as it is named, for the caller to refuse.
    """
    path, packaged = user_path(named), folder / f"{named}.yaml"
    return (
        path if os.path.isfile(path) or not os.path.isfile(packaged) else packaged
    )  # Path.is_file raises on long names
