"""What is believed of a checkpoint: it names no code but kvt's, and no place on the machine.

Lightning imports whatever a configuration names, and calls it: a checkpoint from anywhere would run what it likes.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvt.attention import ATTENTION
from kvt.documents import parse_yaml
from kvt.errors import UserError

PLACES = {"default_root_dir", "model_registry"}
"""Settings of the Trainer that say where things lie: never a checkpoint's to say."""
CALLS = {"callbacks", "devices", "logger", "num_nodes", "plugins", "profiler", "strategy"}
"""Those that bring in other code, or start processes: for the user to say anew …"""
HARMLESS = (None, True, False, 1, "auto")
"""… unless they do nothing of the kind."""


def is_ours(name: object) -> bool:
    """Whether to look for a class of that name runs no code but kvt's."""
    return not isinstance(name, str) or name in ATTENTION or name.startswith("kvt.")


def require_named(path: str | Path, flag: str, name: object, named: Mapping[str, str | None]) -> None:
    """Makes sure that a class is one of kvt's, or that the user has named it too.

    Args:
        path: of the checkpoint that names it.
        flag: what it is there: "model", "data" or "attn".
        name: of the class.
        named: the names that the user gives, by flag.

    Raises:
        UserError: it is neither.
    """
    if not is_ours(name) and name != named.get(flag):
        raise UserError(
            f"--ckpt_path {path}: uses {name:.100}, which is not part of kvt: if that is your own code, add --{flag} "
            f"{name:.100}"
        )


def believe(path: str | Path, text: object, named: Mapping[str, str | None]) -> dict[str, Any]:
    """The configuration in a checkpoint, plain data: of model and data, their classes made sure of.

    Args:
        path: of the checkpoint.
        text: its YAML.
        named: see `require_named`.

    Raises:
        UserError: it is no configuration, or names code that the user does not.
    """
    if not isinstance(text, str):
        raise UserError(f"--ckpt_path {path}: does not say of which task it is")
    content = parse_yaml(text, f"--ckpt_path {path}, its configuration")
    try:
        sections = {name: content[name] for name in ("model", "data")}
        classes = {name: section["class_path"] for name, section in sections.items()}
        settings = {name: dict(section.get("init_args") or {}) for name, section in sections.items()}
        trainer = dict(content.get("trainer") or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"--ckpt_path {path}: does not say of which task it is") from error
    if not all(isinstance(class_path, str) for class_path in classes.values()):
        raise UserError(f"--ckpt_path {path}: does not say of which task it is")
    for name, class_path in classes.items():
        require_named(path, name, class_path, named)
        if (other := _class_in(settings[name])) is not None:
            raise UserError(f"--ckpt_path {path}: its {name} uses {other!s:.100}: give the run's --config too")
    require_named(path, "attn", settings["model"].get("attn"), named)
    made = {name: {"class_path": classes[name], "init_args": settings[name]} for name in classes}
    return (
        {name: content[name] for name in ("seed_everything", "compile") if name in content}
        | made
        | {"trainer": trainer}
    )


def believe_trainer(
    path: str | Path, settings: Mapping[str, Any], given: Collection[str], trains: bool
) -> dict[str, Any]:
    """The settings of the Trainer in a checkpoint that are its to say.

    Args:
        path: of the checkpoint.
        settings: those in it.
        given: names of those that the user gives.
        trains: whether they matter for more than how a finished model is looked at.

    Raises:
        UserError: training went on with others, which the user must give.
    """
    kept = {}
    for name, value in settings.items():
        if name in given or name in PLACES:
            continue
        if name in CALLS and value not in HARMLESS:
            if trains:
                remedy = f"add --{name}, or give the run's --config too"
                raise UserError(f"--ckpt_path {path}: made with {name}={value!s:.100}: {remedy}")
            continue
        if not _is_plain(value):
            raise UserError(f"--ckpt_path {path}: made with {name}={value!s:.100}: give the run's --config too")
        kept[name] = value
    return kept


def without_strange_folder(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of data, but for a data folder that this machine does not have: none is made where a checkpoint says."""
    folder = settings.get("data_dir")
    keep = isinstance(folder, str) and os.path.isdir(os.path.expanduser(folder))
    return {name: value for name, value in settings.items() if name != "data_dir" or keep}


def _class_in(value: Any) -> Any:
    """What a configuration calls by name, however deep; None if nothing."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            return value["class_path"]
        value = [*value.values()]
    parts = value if isinstance(value, list) else []
    return next((found for part in parts if (found := _class_in(part)) is not None), None)


def _is_plain(value: Any) -> bool:
    """Whether it can name nothing: a dot makes a name an import path, or a file."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in (*value, *value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and "." not in value)
