"""The sections of a run's settings, and what of the Trainer's says what a run is: plain data, known without torch."""

from collections.abc import Mapping
from typing import Any

from kvt.system.signatures import defaults_of

Sections = dict[str, Any]
"""Settings by section, {"model": {"lr": 0.001}, "trainer": {"max_epochs": 2}, "seed_everything": 1}: plain data."""

BUILT = ("model", "data")
"""The sections that every configuration has, each of a class that the run builds."""
GROUPS = (*BUILT, "trainer")
"""The sections whose settings each have a flag of their bare name."""
PARTS = (*BUILT, "optimizer")
"""The sections that name a class; the last need not be there."""
OTHERS = ("seed_everything", "compile", "threads", "optimizer", "teacher", "ckpt_path")
"""What a configuration has besides `GROUPS`."""
GIVEN = {"spec", "seed"}
"""Arguments of a task and its data that the run gives them: what the data say of themselves, and its own seed."""
CKPT_PATH_HELP = "a checkpoint to use, or to continue training from, in a new run"

TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20}
"""The Trainer's settings whose defaults are not Lightning's."""
LIGHTNING = defaults_of("lightning", "pytorch/trainer/trainer.py", "Trainer")
"""All of its settings, with Lightning's defaults."""
KEPT = (
    *("accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm", "gradient_clip_val"),
    *("limit_test_batches", "limit_train_batches", "limit_val_batches", "log_every_n_steps", "max_epochs", "max_steps"),
    *("max_time", "min_epochs", "min_steps", "overfit_batches", "precision", "val_check_interval"),
)
"""The Trainer's settings that checkpoints keep: lengths, limits, precision and gradient clipping."""
TRAINER = {
    f"trainer.{name}": TRAINER_DEFAULTS.get(name, default)
    for name, default in LIGHTNING.items()
    if name in KEPT
    or name in ("accelerator", "benchmark", "detect_anomaly", "deterministic", "reload_dataloaders_every_n_epochs")
}
"""The defaults of all that may change what a run comes to; others concern its processes, its output and its places."""


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return name, our value and theirs of each setting that differs, by name; one that is not there is None."""
    names = sorted(ours.keys() | theirs.keys())
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]


def plain(value: Any) -> Any:
    """Return a copy for YAML and JSON: numbers, texts, lists and mappings; anything else as text."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value if isinstance(value, str | int | float | None) else str(value)
