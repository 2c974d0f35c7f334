"""Where the settings of a run come from: YAML files, a checkpoint, or an earlier run that is resumed."""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvt.system.errors import UserError, argument_types, unknown
from kvt.system.files import CONFIGS, find_yaml, parse_yaml, read_yaml, user_path
from kvt.tasks import Task, TaskData
from kvt.training import results
from kvt.training.load_checkpoint import Checkpoint, find_class, read_checkpoint
from kvt.training.run_dir import RunLogger, last_checkpoint

SECTIONS: dict[str, type[Task | TaskData]] = {"model": Task, "data": TaskData}
SCALARS = ("seed_everything", "compile", "ckpt_path")
"""What a YAML may say besides its sections."""
FROM_ELSEWHERE = {"spec", "seed"}
"""Arguments of a task and its data that come from the data and from --seed."""
MAY_DIFFER = {"data_dir", "root", "text", "features", "weights", "enable_progress_bar"}
"""Settings that may change when a run is resumed: where its data lie, what is shown."""


@dataclass(frozen=True)
class RunSource:
    """The classes and the settings of a run, before the flags of the command line.

    Attributes:
        classes: of the task and its data, by section: "model", "data".
        settings: from YAML files, {"model.lr": 0.001, "trainer.max_epochs": 2, "seed_everything": 1}.
        ckpt_path: the checkpoint to use, if there is one.
        checkpoint: the same, read, where it describes the run in place of YAML files.
        resumed: the folder of the run to resume, if it is one.
    """

    classes: Mapping[str, type[Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    ckpt_path: str | None = None
    checkpoint: Checkpoint | None = None
    resumed: Path | None = None

    def require_same(self, given: Mapping[str, Any], base: Mapping[str, Any]) -> None:
        """Raise UserError if a flag changes a setting of the run that is resumed.

        Args:
            given: the settings on the command line, {"model.lr": 0.1}.
            base: those of the run.
        """
        for name, value in given.items():
            flag = name.rpartition(".")[2]
            if flag not in MAY_DIFFER and value != base.get(name):
                raise UserError(
                    f"--resume {self.resumed}: made with {flag}={base.get(name)!s:.60}, not {value!s:.60}: leave "
                    f"--{flag} out, or go on with other settings from --ckpt_path {self.ckpt_path}"
                )

    def logger(self) -> RunLogger:
        """Return the logger of the run that is resumed; events after its checkpoint will be logged again."""
        assert self.resumed is not None
        step = read_checkpoint(self.ckpt_path)["global_step"] if self.ckpt_path else -1
        return RunLogger(self.resumed.parent, self.resumed.name, purge_step=step + 1)


def find_source(flags: Namespace, command: str) -> RunSource | None:
    """Return where a command's settings come from; None where the flags do not say.

    Raises:
        UserError: flags that contradict each other, a file that does not exist or is no configuration.
    """
    if flags.resume is not None:
        return _resumed(flags, command)
    if flags.ckpt_path is not None and not flags.config:
        checkpoint = Checkpoint(flags.ckpt_path, {"model": flags.model, "data": flags.data})
        classes = {"model": checkpoint.task_class, "data": checkpoint.data_class}
        return RunSource(classes, ckpt_path=flags.ckpt_path, checkpoint=checkpoint)
    return _from_files(flags.config, flags.ckpt_path, {"model": flags.model, "data": flags.data})


def _resumed(flags: Namespace, command: str) -> RunSource:
    for name in ("config", "ckpt_path", "fleet", "model", "data"):
        if getattr(flags, name):
            raise UserError(f"--resume {flags.resume}: a run has its own settings and checkpoint: leave --{name} out")
    if command != "fit":
        raise UserError(f"--resume {flags.resume}: only training goes on; {command} takes --ckpt_path")
    folder = user_path(flags.resume).resolve()
    if not (folder / "config.yaml").is_file():
        raise UserError(f"--resume {flags.resume}: no folder of a run, such as lightning_logs/reverse/kv/version_0")
    last = last_checkpoint(folder)
    source = _from_files([str(folder / "config.yaml")], str(last) if last.exists() else None, {})
    assert source is not None
    return RunSource(source.classes, source.settings, source.ckpt_path, resumed=folder)


def is_finished(run: Path) -> bool:
    """Return whether a run has its result."""
    return results.read_json(run / "result.json") is not None


def _from_files(configs: list[str], ckpt_path: str | None, named: Mapping[str, str | None]) -> RunSource | None:
    class_paths, settings = {name: path for name, path in named.items() if path is not None}, {}
    own_classes = {*class_paths}
    for config in configs:
        content = read_config(config)
        for section, values in content.items():
            if section in SECTIONS:
                values = {"class_path": values} if isinstance(values, str) else values
                named_here, values = values.get("class_path"), values.get("init_args") or {}
                if not (isinstance(named_here, str | None) and isinstance(values, dict)):
                    raise UserError(f"--config {config:.200}: {section}: expected class_path and init_args")
                if section not in own_classes and named_here is not None:
                    class_paths[section] = named_here
            if section in SCALARS:
                settings[section] = values
            else:
                settings |= {f"{section}.{name}": value for name, value in values.items()}
    if class_paths.keys() != SECTIONS.keys():
        return None
    classes = {section: find_class(path, section, SECTIONS[section]) for section, path in class_paths.items()}
    for section, cls in classes.items():
        takes = argument_types(cls)
        for name in [name for name in settings if name.startswith(f"{section}.")]:
            setting = name.partition(".")[2]
            if setting in FROM_ELSEWHERE or (section in own_classes and setting not in takes):
                del settings[name]
            elif setting not in takes:
                raise unknown(f"{section} setting of --config {configs[-1]:.200}:", setting, sorted(takes))
    in_files = settings.pop("ckpt_path", None)
    return RunSource(classes, settings, ckpt_path or in_files)


def class_names(config: str) -> dict[str, str]:
    """Return the classes that a configuration names, by flag: "model", "data", and the model's "attn"."""
    content = read_config(config)
    named = {section: content.get(section, {}) for section in SECTIONS}
    found = {section: part.get("class_path") for section, part in named.items()}
    found["attn"] = (named["model"].get("init_args") or {}).get("attn")
    return {flag: name for flag, name in found.items() if isinstance(name, str)}


def read_config(config: str) -> dict[str, Any]:
    """Return the sections of a configuration: a YAML file, the name of a packaged one, or YAML text.

    Raises:
        UserError: there is no such file, or it has no such sections.
    """
    try:
        if "\n" in config and not os.path.isfile(config):
            content = parse_yaml(config, "--config")
        else:
            content = read_yaml(find_yaml(config, CONFIGS), f"--config {config}")
    except FileNotFoundError as error:
        raise UserError(f"--config {config}: no such file") from error
    mappings = isinstance(content, dict) and all(
        isinstance(part, dict) or (name in ("model", "data") and isinstance(part, str))
        for name, part in content.items()
        if name not in SCALARS
    )
    if not mappings:
        raise UserError(f"--config {config:.200}: must hold sections, such as model:, data: and trainer:")
    if strange := [name for name in content if name not in (*SECTIONS, *SCALARS, "trainer")]:
        raise unknown(f"section of --config {config:.200}:", strange[0], [*SECTIONS, "trainer", *SCALARS])
    return content
