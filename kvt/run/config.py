"""`RunConfig`, the configuration of a run as plain data: a task, its data, the Trainer's settings and a seed.

The module does not import torch, which takes seconds. Functions that parse settings or find classes import it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvt.run.sections import BUILT, GIVEN, GROUPS, OTHERS, PARTS, TRAINER, Sections, differing, plain, without_removed
from kvt.system.errors import UserError, argument_types, require_types, unknown
from kvt.system.files import CONFIGS, find_yaml, read_yaml, yaml_names
from kvt.system.quoting import shell_word

if TYPE_CHECKING:
    from kvt.run.load_checkpoint import Checkpoint

NOT_COMPARED = ("model.spec", "data.seed", "data.data_dir")
"""The settings that `RunConfig.flat` leaves out, because the data, the run's seed or the machine sets them."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run, with the content of its config.yaml as plain data.

    `flat` has the settings by name. `name` is a hash of the settings that differ from their defaults.

    Attributes:
        model: class and settings of the task, {"class_path": "kvt.tasks.ListTask", "init_args": {"attn": "kv", …}}.
        data: class and settings of the data, {"class_path": "kvt.tasks.DigitLists", "init_args": {"length": 16, …}}.
        trainer: settings of the Lightning Trainer; a missing setting has its default.
        seed_everything: the seed of the split, the initialisation, the order of batches and all randomness of training.
        compile: whether torch compiles the model.
        threads: number of CPU threads; None: one for a model with less than a million parameters, else torch's number.
        optimizer: the optimiser's class, {"class_path": "torch.optim.AdamW", "init_args": {…}}; None: Adam.
        ckpt_path: the checkpoint from which training continues; None: training begins with new weights.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    seed_everything: int = 0
    compile: bool = False
    threads: int | None = None
    optimizer: dict[str, Any] | None = None
    ckpt_path: str | None = None

    def __post_init__(self) -> None:
        if type(self.seed_everything) is not int:
            raise UserError(f"seed_everything={self.seed_everything!r:.60}: expected an integer")
        for name in PARTS if self.optimizer is not None else BUILT:
            part = getattr(self, name)
            if not (
                isinstance(part, Mapping)
                and isinstance(part.get("class_path"), str)
                and isinstance(part.get("init_args"), Mapping)
            ):
                raise UserError(f"{name}={part!r:.60}: expected a mapping of class_path and init_args")

    @classmethod
    def from_name(cls, name: str) -> "RunConfig":
        """Return the configuration of a task of kvt by the name of its YAML file, such as cifar10."""
        return cls.from_yaml(name)

    @classmethod
    def from_yaml(cls, *files: str | Path) -> "RunConfig":
        """Return the configuration in YAML files; a later file overrides an earlier one.

        Raises UserError if the files do not name the classes of a task and its data.
        """
        from kvt.run.settings import settings_parser

        paths, classes, sections = read_files([*map(str, files)])
        if not classes:
            raise UserError(f"{', '.join(map(str, files))}: expected model: and data: with their class_path")
        return cls.of(paths, settings_parser(**classes).parse_all([], sections))

    @classmethod
    def from_run(cls, folder: str | Path) -> "RunConfig":
        """Return the configuration of a run from the run's folder, such as lightning_logs/reverse/kv/version_0."""
        return cls.from_yaml(Path(folder) / "config.yaml")

    @classmethod
    def from_checkpoint(cls, path: str | Path, **own: str | None) -> "RunConfig":
        """Return the configuration of the run that saved a checkpoint, to continue training from the checkpoint.

        Args:
            path: path of the checkpoint.
            own: import paths of classes outside kvt that the checkpoint uses, by the keywords attn, model and data.
                kvt imports only classes that you name.

        Raises:
            UserError: the file is no checkpoint of a task, the checkpoint uses a class outside kvt that `own` lacks,
                or a setting does not have the type that its class declares.
        """
        from kvt.run.load_checkpoint import Checkpoint

        return cls.of_checkpoint(Checkpoint(path, own))

    @classmethod
    def of_checkpoint(cls, checkpoint: "Checkpoint", attn: str | None = None) -> "RunConfig":
        """Return the configuration of the run that saved a checkpoint.

        `attn` is the import path of an attention outside kvt. The method does not parse the checkpoint's settings,
        but checks their types against the signatures of the classes.
        """
        from kvt.tasks.base import class_name

        with checkpoint.add_checkpoint_path():
            checkpoint.require_known_attention(attn)
            classes = checkpoint.classes
            settings: Sections = {section: checkpoint.settings(section, kind) for section, kind in classes.items()}
            settings |= {"trainer": checkpoint.trainer_settings, "optimizer": checkpoint.optimizer}
        others = {"seed_everything": settings["data"].pop("seed", 0), "ckpt_path": str(checkpoint.path)}
        return cls.of({section: class_name(kind) for section, kind in classes.items()}, settings | others)

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration with `settings`, a dict by the names of `flat`, and with no other settings."""
        parts: dict[str, Any] = {"trainer": {}}
        for name, value in settings.items():
            section, _, setting = name.partition(".")
            if section in (*GROUPS, *PARTS):
                parts.setdefault(section, {})[setting] = value
        for section in parts.keys() & {*PARTS}:
            init_args = parts[section]
            parts[section] = {"class_path": init_args.pop("class", None), "init_args": init_args}
        return cls(**parts, seed_everything=settings["seed"])

    @classmethod
    def of(cls, paths: Mapping[str, str], sections: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration with these classes and settings.

        Args:
            paths: import paths of the classes of "model" and "data"; a name without a dot is a class of kvt.tasks.
            sections: settings by section.
        """
        full = {name: path if "." in path else f"kvt.tasks.{path}" for name, path in paths.items()}
        parts: dict[str, Any] = {}
        parts |= {name: {"class_path": path, "init_args": sections.get(name, {})} for name, path in full.items()}
        others = {name: sections[name] for name in ("trainer", *OTHERS) if name in sections}
        return cls(**parts, **others)

    @property
    def classes(self) -> dict[str, type[Any]]:
        """The classes of the task and its data, imported."""
        return find_classes({"model": self.model["class_path"], "data": self.data["class_path"]})

    @property
    def imports(self) -> dict[str, str]:
        """The name of the attention, "attn", and the import paths of task and data, "model" and "data"."""
        attn = str(self.model["init_args"].get("attn"))
        return {"attn": attn, "model": self.model["class_path"], "data": self.data["class_path"]}

    @property
    def flat(self) -> dict[str, Any]:
        """A dict of all settings that may change the result, by name: "seed", "model.class", "model.dim"."""
        from kvt.tasks.datamodule import as_recorded

        data = {**self.data, "init_args": as_recorded(self.data["class_path"], self.data["init_args"])}
        return replace(self, data=data).stated

    @property
    def stated(self) -> dict[str, Any]:
        """The settings of `flat` in the form of config.yaml, which needs no import of the data's class."""
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
        """The defaults of the settings in `flat` that have a default."""
        return _defaults(self.model["class_path"], self.data["class_path"])

    @property
    def asked(self) -> dict[str, Any]:
        """The settings in `flat` that differ from their defaults."""
        usual = self.defaults
        return {name: value for name, value in self.flat.items() if value not in ({}, usual.get(name))}

    @property
    def name(self) -> str:
        """The run's name: 12 hexadecimal digits of a hash of the settings that differ from their defaults.

        A new argument with a default does not rename runs. If a later version of kvt changes a default, the name stays
        the same, and `differences` reports the change, because config.yaml stores every value.
        """
        asked = RunConfig.from_flat(self.asked)
        sections = {name: getattr(asked, name) for name in ("seed_everything", "trainer", *PARTS)}
        # The parser may return gradient_clip_val, an `int | float`, as 5 or as 5.0, and both values get one name. Other
        # numbers of the Trainer are not converted: limit_val_batches=1 is one batch, limit_val_batches=1.0 all batches.
        sections["trainer"] = {n: _whole(v) if n == "gradient_clip_val" else v for n, v in sections["trainer"].items()}
        return short_hash({name: values for name, values in sections.items() if values is not None})

    def differences(self, other: "RunConfig") -> list[tuple[str, Any, Any]]:
        """Return (name, value in `self`, value in `other`) for each setting of `flat` that differs, sorted by name.

        If one configuration lacks a setting, the setting has its default there: a later version of kvt added it, and
        the default does not change results. The method does not import the classes of `other`.
        """
        ours, theirs = ({**self.defaults, **config.flat} for config in (self, other))
        return differing(ours, theirs)

    def changed(self, **settings: Any) -> "RunConfig":
        """Return a copy with changed settings. Names are those of the command line's flags: attn="kv", max_epochs=1.

        Raises:
            UserError: a setting does not exist, has the wrong type, or has a value that a run does not accept.
        """
        from kvt.run.settings import require_settings, settings_parser

        classes = self.classes
        parser = settings_parser(**classes)
        sections = parser.parse_given(parser.by_section(settings))
        for section, cls in classes.items():
            nulls = {name: value for name, value in sections.get(section, {}).items() if value is None}
            require_types(nulls, cls)  # the parser accepts None for every type
        changed = self.merged(sections)
        require_settings(changed.sections)
        return changed

    def merged(self, sections: Mapping[str, Any]) -> "RunConfig":
        """Return a copy in which the parsed settings in `sections`, by section, replace the settings of `self`."""
        parts: dict[str, Any] = {name: sections[name] for name in OTHERS if name in sections}
        for name in {*BUILT} & sections.keys():
            part = getattr(self, name)
            parts[name] = {**part, "init_args": {**part["init_args"], **sections[name]}}
        if "trainer" in sections:
            parts["trainer"] = {**self.trainer, **sections["trainer"]}
        return replace(self, **parts)

    @property
    def own_flags(self) -> str:
        """The flags that name the run's classes outside kvt for a checkpoint's command: " --data my_task.Bits"."""
        own = [(name, path) for name, path in self.imports.items() if "." in path and not path.startswith("kvt.")]
        return "".join(f" --{name} {shell_word(path)}" for name, path in own)

    @property
    def sections(self) -> Sections:
        """The settings by section. A section in BUILT has the content of its `init_args`, without `class_path`."""
        return {**vars(self), **{name: getattr(self, name)["init_args"] for name in BUILT}}

    def as_dict(self) -> dict[str, Any]:
        """Return the content of config.yaml."""
        content = plain(vars(self))
        return {name: content[name] for name in (*OTHERS[:-1], "trainer", *BUILT, "ckpt_path")}


@cache  # a study reads many runs of the same classes
def _defaults(model: str, data: str) -> Mapping[str, Any]:
    from kvt.run.settings import settings_parser

    paths = {"model": model, "data": data}
    settings = plain(settings_parser(**find_classes(paths)).get_defaults().as_dict())
    flat = RunConfig.of(paths, settings).flat
    return MappingProxyType({name: flat[name] for name in flat if name != "seed" and not name.endswith(".class")})


def short_hash(settings: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of a hash of settings. The hash does not depend on the order of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _whole(value: Any) -> Any:
    """Return a whole-numbered float as an int, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bare(name: str) -> str:
    """Return the name of a setting of `RunConfig.flat` without the section, as in the setting's short flag.

    >>> bare("model.dim"), bare("model.class"), bare("seed")
    ('dim', 'model', 'seed')
    """
    return name.removesuffix(".class").rpartition(".")[2]


def in_short(value: Any) -> Any:
    """Return text for a class with arguments, "AdamW(weight_decay=0.1)", or a list of them; other values unchanged.

    >>> in_short([{"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}]), in_short(3)
    ('AdamW(weight_decay=0.1)', 3)
    """
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return ", ".join(str(in_short(part)) for part in value)
    if not (isinstance(value, dict) and "class_path" in value):
        return value
    arguments = ", ".join(f"{name}={part}" for name, part in (value.get("init_args") or {}).items())
    return str(value["class_path"]).rpartition(".")[2] + f"({arguments})" * bool(arguments)


def find_classes(paths: Mapping[str, str]) -> dict[str, type[Any]]:
    """Return a dict of the task's class, "model", and the data's class, "data", from a dict of import paths."""
    from kvt.run.settings import SECTIONS
    from kvt.tasks.base import find_class

    return {section: find_class(path, section, SECTIONS[section]) for section, path in paths.items()}


def read_files(
    configs: Sequence[str], named: Mapping[str, str | None] = MappingProxyType({})
) -> tuple[dict[str, str], dict[str, type[Any]], Sections]:
    """Return three dicts by section: import paths of the classes in YAML files, the classes, and all settings.

    The dict of classes is empty if the class of the task or of the data is missing. A class in `named`, by section,
    replaces the class in the files, and gets the settings in the files that its constructor has as arguments.
    """
    class_paths, sections = read_paths(configs, named)
    if class_paths.keys() != {*BUILT}:
        return class_paths, {}, sections
    for section, cls in (classes := find_classes(class_paths)).items():
        takes, given, own = argument_types(cls), sections.get(section, {}), named.get(section)
        if own is None and (strange := given.keys() - takes.keys()):
            raise unknown(f"{section} setting of --config {configs[-1]:.200}:", min(strange), sorted(takes))
        sections[section] = {name: given[name] for name in given if name in takes and name not in GIVEN}
    return class_paths, classes, sections


def read_paths(configs: Sequence[str], named: Mapping[str, str | None]) -> tuple[dict[str, str], Sections]:
    """Return the import paths of classes in YAML files, with `named` in place of them, and all settings."""
    sections: Sections = {}
    class_paths: dict[str, str] = {}
    for config in configs:
        try:
            content = read_config(find_yaml(config, CONFIGS), f"--config {config:.200}")
        except FileNotFoundError as error:
            if config.isidentifier():
                raise unknown("--config", config, yaml_names(CONFIGS)) from error
            raise UserError(f"--config {config}: no such file") from error
        for section, values in content.items():
            if section in OTHERS:
                sections[section] = values
                continue
            if section in BUILT:
                values = {"class_path": values} if isinstance(values, str) else values
                class_path, values = values.get("class_path"), values.get("init_args") or {}
                if not (isinstance(class_path, str | None) and isinstance(values, dict)):
                    raise UserError(f"--config {config:.200}: {section}: expected class_path and init_args")
                class_paths |= {section: class_path} if class_path else {}
            sections[section] = sections.get(section, {}) | values
    return class_paths | {section: path for section, path in named.items() if path is not None}, sections


def read_config(path: Path, name: str) -> dict[str, Any]:
    """Return the sections of a configuration in a YAML file.

    Raises a UserError that begins with `name` if the file has anything else than sections, and FileNotFoundError if
    the file does not exist.
    """
    content = read_yaml(path, name)
    content = without_removed(content) if isinstance(content, dict) else content
    mappings = isinstance(content, dict) and all(
        isinstance(part, dict) or (section in BUILT and isinstance(part, str))
        for section, part in content.items()
        if section not in OTHERS
    )
    if not mappings:
        raise UserError(f"{name}: expected sections such as model:, data: and trainer:")
    if strange := [section for section in content if section not in (*GROUPS, *OTHERS)]:
        raise unknown(f"section of {name}:", strange[0], [*GROUPS, *OTHERS])
    return content
