"""The configurations of the runs of a study: how they are made, named and compared."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L

from kvt.system.errors import argument_types, require_types, unknown
from kvt.tasks.datamodule import as_recorded
from kvt.training.config import RunConfig, find_classes
from kvt.training.load_checkpoint import SECTIONS
from kvt.training.settings import TRAINER_DEFAULTS, plain, require_settings, settings_parser

Config = dict[str, Any]  # what config.yaml holds, see `RunConfig.as_dict`; of any version of kvt if it was stored

EXCLUDED = {  # arguments that no axis may set: the study sets them, or they only concern output and places of files
    "model": {"spec"},
    "data": {"seed", "data_dir"},
    "trainer": {
        *("logger", "callbacks", "default_root_dir", "enable_autolog_hparams", "model_registry"),
        *("devices", "num_nodes", "strategy", "plugins", "sync_batchnorm", "use_distributed_sampler"),
        *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"),
        *("fast_dev_run", "barebones", "profiler", "inference_mode", "limit_predict_batches"),
    },
}
PARTS = (*SECTIONS, "optimizer")
"""The sections of a configuration that name a class; the last need not be there."""
TRAINER = {  # the Trainer's settings with their defaults
    name: parameter.default
    for name, parameter in inspect.signature(L.Trainer).parameters.items()
    if name not in EXCLUDED["trainer"]
} | {"log_every_n_steps": TRAINER_DEFAULTS["log_every_n_steps"]}


class TaskConfig:
    """A task's YAML file; axes of a grid replace its settings, by bare name and with the types of their classes."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        base = RunConfig.from_yaml(path)
        trainer = {name: value for name, value in base.trainer.items() if name in TRAINER}
        self._base = replace(base, trainer=trainer, ckpt_path=None)
        self._parser = settings_parser(**base.classes)
        self.section_of = {
            name: section
            for section, excluded in EXCLUDED.items()
            for name in self._base.sections[section]
            if name not in {"task", *excluded}  # tasks are listed under tasks:
        } | {"optimizer": ""}

    def typed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by bare name with the types of their classes; raise UserError if a run would refuse them."""
        if strange := [name for name in settings if name not in self.section_of]:
            raise unknown(f"setting of {self.name}:", strange[0], sorted(self.section_of))
        parsed = self._parser.parse_given(self._parser.by_section(settings))
        for section, cls in self._base.classes.items():
            nulls = {name: value for name, value in parsed.get(section, {}).items() if value is None}
            require_types(nulls, cls)  # the parser lets them pass, whatever the type
        require_settings(self._base.merged(parsed).sections)
        return {name: parsed.get(self.section_of[name], parsed)[name] for name in settings}

    def config(self, settings: Mapping[str, Any], seed: int) -> Config:
        """Return the configuration of a run with these typed settings; sections they do not change are shared."""
        return vars(self._base.merged({"seed_everything": seed, **self._parser.by_section(settings)}))


def on_one_device(config: Config, data_dir: str, **trainer: Any) -> RunConfig:
    """Configure a run of a study: one device, no progress bar, and `data_dir` if the class of the data takes it."""
    run = RunConfig(**config)
    data = {"data_dir": data_dir} if "data_dir" in argument_types(run.classes["data"]) else {}
    return run.merged({"data": data, "trainer": {"devices": 1, "enable_progress_bar": False, **trainer}})


def run_name(config: Config) -> str:
    """Return a run's name: 12 hexadecimal digits of a hash of the settings that differ from their defaults.

    So a new argument with a default renames no run. Where a default has changed, the name stays and `differences`
    tells: the stored configuration has every value.
    """
    return short_hash(_asked(config))


def short_hash(settings: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of a hash of settings, whatever their order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def command_words(config: Config) -> list[str]:
    """Return the arguments of `kvt fit` that repeat a run of this configuration on one device, as in a study.

    They are the settings that differ from their defaults, which name no YAML file: that of a run may be gone.
    """
    asked = _asked(config)
    seed, settings = asked.pop("seed_everything"), {"devices": 1, **asked.pop("trainer")}
    words = [f"--{section}={part['class_path']}" for section, part in asked.items()]
    for section, values in {**{name: part["init_args"] for name, part in asked.items()}, "trainer": settings}.items():
        for name, value in values.items():
            words.append(f"--{section}.{name}={value if isinstance(value, str) else json.dumps(value)}")
    return [*words, f"--seed={seed}"]


def _asked(config: Config) -> dict[str, Any]:
    """Return the settings by section that differ from their defaults."""
    trainer = config["trainer"].items()
    asked: dict[str, Any] = {"seed_everything": config["seed_everything"]}
    asked["trainer"] = {name: value for name, value in trainer if name in TRAINER and value != TRAINER[name]}
    for section, defaults in _defaults(*classes_of(config)).items():
        class_path, settings = config[section]["class_path"], config[section]["init_args"]
        usual = as_recorded(class_path, defaults)
        asked[section] = {
            "class_path": class_path,
            "init_args": {
                name: value
                for name, value in as_recorded(class_path, settings).items()
                if name not in EXCLUDED[section] and value not in ({}, usual.get(name))
            },
        }
    return asked | ({"optimizer": config["optimizer"]} if config.get("optimizer") else {})


def differences(stored: Config, config: Config) -> list[str]:
    """Return how a stored configuration differs from the current one, by setting: ["length is 8, now 16"].

    A setting that is not stored is newer than the run, which was made as its default makes it.
    """
    ours, theirs = settings_of(config), settings_of(stored, _defaults(*classes_of(config)))
    return [
        f"{bare(name)} is {theirs.get(name)}, now {ours.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def settings_of(config: Config, defaults: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return all settings of a run by section and name, such as "model.dim"; those it lacks have their default."""
    found = {"seed": config["seed_everything"]}
    found |= {f"trainer.{name}": config["trainer"].get(name, default) for name, default in TRAINER.items()}
    for section in PARTS:
        if part := config.get(section):
            found[f"{section}.class"] = part["class_path"]
            settings = as_recorded(part["class_path"], {**defaults.get(section, {}), **part["init_args"]}).items()
            found |= {f"{section}.{name}": value for name, value in settings if name not in EXCLUDED.get(section, ())}
    return found


def bare(name: str) -> str:
    """Return the bare name of one of `settings_of`, as its flag has it.

    >>> bare("model.dim"), bare("model.class"), bare("seed")
    ('dim', 'model', 'seed')
    """
    return name.removesuffix(".class").rpartition(".")[2]


def classes_of(config: Config) -> tuple[str, ...]:
    return tuple(config[section]["class_path"] for section in SECTIONS)


@cache  # a study reads many runs of few classes
def _defaults(*classes: str) -> dict[str, Any]:
    """Return the default settings of a task and its data by section, given the import paths of their classes."""
    parser = settings_parser(**find_classes(dict(zip(SECTIONS, classes, strict=True))))
    defaults = plain(parser.get_defaults().as_dict())
    return {section: defaults[section] for section in SECTIONS}
