"""The configuration of a task and of its runs: each setting by its bare name, typed."""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L

from kvt.system.errors import UserError, unknown
from kvt.tasks.base import find_class
from kvt.training.config import RunConfig
from kvt.training.load_checkpoint import SECTIONS
from kvt.training.settings import TRAINER_DEFAULTS, plain, settings_parser

Config = dict[str, Any]  # seed_everything, model, data and trainer, as `kvt fit --config` reads them: plain data
Shape = frozenset[tuple[str, str]]  # settings by name, each as JSON

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
TRAINER = {  # the Trainer's settings with their defaults
    name: parameter.default
    for name, parameter in inspect.signature(L.Trainer).parameters.items()
    if name not in EXCLUDED["trainer"]
} | {"log_every_n_steps": TRAINER_DEFAULTS["log_every_n_steps"]}


class Configuration:
    """The YAML of a task, with the defaults of the classes that it names."""

    def __init__(self, path: Path) -> None:
        self._task = path.stem
        if not path.is_file():
            raise UserError(f"tasks: {path.stem}: no such file: {path}")
        self._base = RunConfig.from_yaml(path)
        self._parser = settings_parser(**self._base.classes)
        self._defaults = plain(self._parser.get_defaults().as_dict())
        self.section_of = {
            name: section
            for section, values in self._base.sections.items()
            if section in EXCLUDED
            for name in values
            if name not in EXCLUDED[section]
        }

    def typed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by bare name with the types of their classes."""
        for name in settings:
            if name not in self.section_of:
                raise unknown(f"setting of {self._task}:", name, sorted(self.section_of))
        parsed = self._parser.parse_given(self._parser.by_section(settings))
        return {name: parsed[self.section_of[name]][name] for name in settings}

    def resolve(self, settings: Mapping[str, Any], seed: int) -> Config:
        """Return the configuration of a run with these typed settings: the same if a default is written out."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            sections.setdefault(self.section_of[name], {})[name] = value
        run = self._base.merged(sections)
        config: Config = {"seed_everything": seed}
        for section in SECTIONS:
            part = getattr(run, section)
            kept = {name: value for name, value in part["init_args"].items() if name not in EXCLUDED[section]}
            if kept.get("attn_kwargs") == {}:
                kept["attn_kwargs"] = None
            config[section] = {**part, "init_args": kept}
        trainer = {name: value for name, value in run.trainer.items() if name in TRAINER and value != TRAINER[name]}
        return config | {"trainer": trainer}

    def name(self, config: Config) -> str:
        """Return a run's name: 12 hexadecimal digits of a hash of its settings that are not their classes' defaults.

        So a new argument with a default renames no run. Where a default has changed, the name stays and
        `differences` tells: the stored configuration has every value.
        """
        asked = dict(config)
        for section in SECTIONS:
            defaults, settings = self._defaults[section], config[section]["init_args"].items()
            asked[section] = {**config[section], "init_args": {k: v for k, v in settings if v != defaults[k]}}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def differences(stored: Config, config: Config) -> list[str]:
    """Return how a stored configuration differs from the current one, by setting: ["length is 8, now 16"].

    Any version of kvt may have stored it. A setting that is not stored is newer than the run, which was made as its
    default makes it.
    """
    ours, theirs = settings_of(config), _stored_settings(stored, config)
    return [
        f"{name.rpartition('.')[2]} is {theirs.get(name)}, now {ours.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def finder(configs: Mapping[str, Config]) -> Callable[[Config], str | None]:
    """Return a function from a stored configuration to the name of the one with equal settings, None without one."""
    like = {_classes(config): config for config in configs.values()}
    names = {json.dumps(settings_of(config), sort_keys=True): name for name, config in configs.items()}

    def find(stored: Config) -> str | None:
        if (config := like.get(_classes(stored))) is None:
            return None  # nor are its classes imported: a result may come from anywhere
        return names.get(json.dumps(_stored_settings(stored, config), sort_keys=True))

    return find


def _classes(config: Config) -> tuple[str, ...]:
    return tuple(config[section]["class_path"] for section in SECTIONS)


def _stored_settings(stored: Config, config: Config) -> dict[str, Any]:
    """Return a stored configuration's settings; those it lacks have the defaults of the classes in `config`."""
    found = settings_of(stored)
    for section in SECTIONS:
        if missing := config[section]["init_args"].keys() - stored[section]["init_args"].keys():
            defaults = _class_defaults(section, config[section]["class_path"])
            found |= {f"{section}.{name}": defaults[name] for name in missing}
    return found


def settings_of(config: Config) -> dict[str, Any]:
    """Return all settings of a run by section and name, such as "model.dim", with the Trainer's defaults."""
    found = {"seed": config["seed_everything"]}
    found |= {f"trainer.{name}": config["trainer"].get(name, default) for name, default in TRAINER.items()}
    for section in SECTIONS:
        found[f"{section}.class"] = config[section]["class_path"]
        settings = config[section]["init_args"].items()
        found |= {f"{section}.{name}": value for name, value in settings if name not in EXCLUDED[section]}
    return json.loads(json.dumps(found))  # as it is stored: a tuple is a list


def shape_of(config: Config) -> Shape:
    """Return the settings that determine a run's duration: runs of one shape take equally long."""
    settings = settings_of(config) | dict.fromkeys(("seed", "model.lr", "data.task"))
    return frozenset((name, json.dumps(value, sort_keys=True)) for name, value in settings.items())


@cache  # a study reads many runs of few classes
def _class_defaults(section: str, path: str) -> dict[str, Any]:
    cls = find_class(path, section, SECTIONS[section])
    defaults: dict[str, Any] = plain(settings_parser(**{section: cls}).get_defaults()[section].as_dict())
    return defaults
