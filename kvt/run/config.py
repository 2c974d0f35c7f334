"""`RunConfig`, the configuration of a run.

The module does not import torch, because the import takes seconds. Functions that need torch import it when called.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvt.run.sections import BUILT, GROUPS, ORDER, OTHERS, PARTS, TRAINER, Config
from kvt.system import CONFIGS, UserError, arguments, find_yaml, parse_yaml, unknown, yaml_names

NOT_COMPARED = ("data.data_dir",)
"""Settings of the data that `RunConfig.flat` leaves out because they depend on the machine."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run: the content of its config.yaml, as plain data.

    Attributes:
        model: class and settings of the task, {"class_path": "kvt.tasks.ListTask", "init_args": {"attn": "kv", …}}.
        data: class and settings of the data, {"class_path": "kvt.tasks.DigitLists", "init_args": {"length": 16, …}}.
        trainer: settings of the Lightning Trainer; a missing setting has its default.
        seed_everything: the seed of the split, the initialisation, the order of batches and all randomness of training.
        compile: whether torch.compile compiles the model.
        threads: number of CPU threads; None: one for a model with less than a million parameters, else torch's number.
        optimizer: the optimiser's class, {"class_path": "torch.optim.AdamW", "init_args": {…}}; None: Adam.
        ckpt_path: the checkpoint to measure or to start training from; None: training begins with new weights.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    seed_everything: int = 0
    compile: bool = False
    threads: int | None = None
    optimizer: dict[str, Any] | None = None
    ckpt_path: str | None = None

    @classmethod
    def from_yaml(cls, *files: str | Path) -> "RunConfig":
        """Return the configuration in `files`, which are paths of YAML files or names of tasks such as cifar10.

        A later file overrides an earlier one, and settings in no file get their defaults. Raises UserError if a file is
        missing or invalid, or if the files do not name the classes of a task and its data.
        """
        from kvt.run.cli import parse_config

        return cls(**parse_config(read_configs([*map(str, files)])))

    from_name = from_yaml

    @classmethod
    def from_run(cls, folder: str | Path) -> "RunConfig":
        """Return the configuration of a run from the run's folder, such as lightning_logs/reverse/kv/version_0."""
        return cls.from_yaml(Path(folder) / "config.yaml")

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration with only `settings`, which have names as in `flat`, such as "model.dim"."""
        parts: dict[str, Any] = {"trainer": {}}
        for name, value in settings.items():
            section, _, setting = name.partition(".")
            if section in (*GROUPS, *PARTS):
                parts.setdefault(section, {})[setting] = value
        for section in parts.keys() & {*PARTS}:
            init_args = parts[section]
            parts[section] = {"class_path": init_args.pop("class", None), "init_args": init_args}
        return cls(**parts, seed_everything=settings["seed"])

    @property
    def classes(self) -> dict[str, Any]:
        """A dict of imported classes: "model" is the class of the task, "data" the class of its data."""
        from kvt.tasks.datamodule import classes_of

        return classes_of(vars(self))

    @property
    def flat(self) -> dict[str, Any]:
        """The settings by which runs are compared: a dict with keys such as "seed", "model.class" and "model.dim"."""
        from kvt.tasks.datamodule import as_recorded

        data = {**self.data, "init_args": as_recorded(self.data["class_path"], self.data["init_args"])}
        return replace(self, data=data).stated

    @property
    def stated(self) -> dict[str, Any]:
        """Like `flat`, but with settings of the data exactly as in config.yaml. This property imports no class."""
        settings = {"seed": self.seed_everything, **TRAINER}
        trainer = {f"trainer.{name}": value for name, value in self.trainer.items()}
        settings |= {name: value for name, value in trainer.items() if name in TRAINER}
        for section in PARTS:
            if part := getattr(self, section):
                settings[f"{section}.class"] = part["class_path"]
                settings |= {f"{section}.{name}": value for name, value in part["init_args"].items()}
        return {name: value for name, value in settings.items() if name not in NOT_COMPARED}

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The defaults of the settings in `flat`, except the seed, the classes and the optimiser's arguments."""
        return _defaults(self.model["class_path"], self.data["class_path"])

    @property
    def asked(self) -> dict[str, Any]:
        """The seed, the classes, and those settings in `flat` whose values are neither the default nor {}."""
        usual = self.defaults
        return {name: value for name, value in self.flat.items() if value not in ({}, usual.get(name))}

    @property
    def name(self) -> str:
        """The run's name: 12 hexadecimal digits of a hash of `asked`.

        If a later version of kvt adds a setting or changes a default, configurations without the setting keep their
        names. `differences` reports a changed default, because the config.yaml of a run stores every value.
        """
        asked = RunConfig.from_flat(self.asked)
        sections = {name: getattr(asked, name) for name in ("seed_everything", "trainer", *PARTS)}
        # The parser may return gradient_clip_val, an `int | float`, as 5 or as 5.0, which both become 5 here. Other
        # numbers of the Trainer stay as they are: limit_val_batches=1 is one batch, limit_val_batches=1.0 all batches.
        sections["trainer"] = {n: _whole(v) if n == "gradient_clip_val" else v for n, v in sections["trainer"].items()}
        return short_hash({name: values for name, values in sections.items() if values is not None})

    def differences(self, other: "RunConfig") -> list[tuple[str, Any, Any]]:
        """Return (name, value in `self`, value in `other`) for each setting of `flat` that differs, sorted by name.

        If one configuration lacks a setting, the default counts as its value, because a later version of kvt may have
        added the setting, with a default that does not change results. The method imports no class of `other` from
        outside kvt.
        """
        ours, theirs = ({**self.defaults, **config.flat} for config in (self, other))
        names = sorted(ours.keys() | theirs.keys())
        return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]

    def changed(self, **settings: Any) -> "RunConfig":
        """Return a copy with changed settings. Names are those of the command line's flags: attn="kv", max_epochs=1.

        Raises:
            UserError: a setting does not exist, or has a value of the wrong type.
        """
        from kvt.run.cli import typed_settings

        return self.merged(typed_settings(self.classes, settings))

    def merged(self, sections: Mapping[str, Any]) -> "RunConfig":
        """Return a copy with the settings in `sections`, such as {"model": {"dim": 32}, "seed_everything": 1}."""
        parts: dict[str, Any] = {name: sections[name] for name in OTHERS if name in sections}
        for name in {*BUILT} & sections.keys():
            part = getattr(self, name)
            parts[name] = {**part, "init_args": {**part["init_args"], **sections[name]}}
        if "trainer" in sections:
            parts["trainer"] = {**self.trainer, **sections["trainer"]}
        return replace(self, **parts)

    @property
    def imports(self) -> dict[str, str]:
        """A dict: "model" and "data" are import paths, "attn" is a name or import path, or the text "None" if unset."""
        attn = str(self.model["init_args"].get("attn"))
        return {"attn": attn, "model": self.model["class_path"], "data": self.data["class_path"]}

    def as_dict(self) -> Config:
        """Return the content of config.yaml."""
        return {name: deepcopy(getattr(self, name)) for name in ORDER}


@cache  # a study reads many runs of the same classes
def _defaults(model: str, data: str) -> Mapping[str, Any]:
    from kvt.run.cli import default_settings
    from kvt.tasks.datamodule import classes_of

    parts = {"model": {"class_path": model}, "data": {"class_path": data}}
    sections = default_settings(classes_of(parts))
    flat = RunConfig(**sections | {name: {**parts[name], "init_args": sections.get(name, {})} for name in parts}).flat
    return MappingProxyType({name: flat[name] for name in flat if name != "seed" and not name.endswith(".class")})


def short_hash(settings: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of a hash of settings. The hash does not depend on the order of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bare(name: str) -> str:
    """Return the name of a setting of `RunConfig.flat` without its section, as in a short flag.

    >>> bare("model.dim"), bare("model.class"), bare("seed")
    ('dim', 'model', 'seed')
    """
    return name.removesuffix(".class").rpartition(".")[2]


def in_short(value: Any) -> Any:
    """Return a class, or a list of classes, as text such as "AdamW(weight_decay=0.1)"; other values unchanged.

    >>> in_short([{"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}]), in_short(3)
    ('AdamW(weight_decay=0.1)', 3)
    """
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return ", ".join(str(in_short(part)) for part in value)
    if not (isinstance(value, dict) and "class_path" in value):
        return value
    arguments = ", ".join(f"{name}={part}" for name, part in (value.get("init_args") or {}).items())
    return str(value["class_path"]).rpartition(".")[2] + f"({arguments})" * bool(arguments)


def read_configs(files: Sequence[str], named: Mapping[str, str | None] = MappingProxyType({})) -> Config:
    """Return the configuration in `files`, paths of YAML files or names of tasks, in the form of config.yaml.

    A later file overrides an earlier one. `named` may map "model" or "data" to the import path of a class, which
    replaces the class in the files, and gets those settings in the files that its constructor takes. Raises UserError
    if a file does not exist or is invalid, or if the task or the data have no class.
    """
    config: Config = {"trainer": {}, **{section: {"init_args": {}} for section in BUILT}}
    for file in files:
        name = f"--config {file}"
        if not (path := find_yaml(file, CONFIGS)).is_file():
            is_name = file.isidentifier()
            raise unknown("--config", file, yaml_names(CONFIGS)) if is_name else UserError(f"{name}: no such file")
        if not isinstance(content := parse_yaml(path.read_bytes(), name), dict):
            raise UserError(f"{name}: expected sections such as model:, data: and trainer:")
        for section, part in content.items():
            if section in BUILT:
                part = {"class_path": part} if isinstance(part, str) else part
                if not isinstance(part, dict) or part.keys() - {"class_path", "init_args"}:
                    raise UserError(f"{name}: {section}: expected class_path and init_args, and nothing else")
                settings = {**config[section]["init_args"], **(part.get("init_args") or {})}
                config[section] = {**config[section], **part, "init_args": settings}
            elif section == "trainer":
                config["trainer"] = {**config["trainer"], **(part or {})}
            elif section in OTHERS:
                config[section] = part
            else:
                raise unknown(f"section of {name}:", section, [*GROUPS, *OTHERS])
    for section in BUILT:
        part, own = config[section], named.get(section)
        if own is not None:
            from kvt.tasks.datamodule import section_class

            takes = arguments(section_class(section, own))
            kept = {name: value for name, value in part["init_args"].items() if name in takes}
            config[section] = {"class_path": own, "init_args": kept}
        elif not (path := part.get("class_path")):
            missing = f"{', '.join(files)}: class_path of {section} is missing" if files else "no task"
            raise UserError(f"{missing}: pass a task's YAML, such as --config cifar10")
        elif "." not in path:
            part["class_path"] = f"kvt.tasks.{path}"
    return config
