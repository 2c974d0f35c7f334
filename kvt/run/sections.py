"""The sections of a configuration, and the Trainer settings that distinguish runs. The module imports no torch."""

from typing import Any

Config = dict[str, Any]
"""The content of config.yaml: {"model": {"class_path": …, "init_args": …}, "trainer": {"max_epochs": 2}, …}."""
BUILT = ("model", "data")
"""The sections with the classes that every run builds: "model" is the task, "data" the data."""
GROUPS = (*BUILT, "trainer")
"""The sections whose settings have a short flag, such as --lr for --model.lr."""
PARTS = (*BUILT, "optimizer")
"""The sections that name a class. A run may lack the section "optimizer"."""
OTHERS = ("seed_everything", "compile", "threads", "optimizer", "ckpt_path")
"""The settings and sections of a configuration that `GROUPS` lacks."""
ORDER = ("seed_everything", "compile", "threads", "optimizer", "trainer", *BUILT, "ckpt_path")
"""The settings and sections in the order of config.yaml."""
TRAINER = {
    **{"trainer.accelerator": "auto", "trainer.precision": None, "trainer.callbacks": None},
    **{"trainer.max_epochs": None, "trainer.min_epochs": None, "trainer.max_steps": -1, "trainer.min_steps": None},
    **{"trainer.max_time": None, "trainer.limit_train_batches": None, "trainer.limit_val_batches": None},
    **{"trainer.limit_test_batches": None, "trainer.overfit_batches": 0.0, "trainer.val_check_interval": None},
    **{"trainer.check_val_every_n_epoch": 1, "trainer.log_every_n_steps": 20, "trainer.accumulate_grad_batches": 1},
    **{"trainer.gradient_clip_val": None, "trainer.gradient_clip_algorithm": None, "trainer.deterministic": None},
    **{"trainer.benchmark": None, "trainer.detect_anomaly": False, "trainer.reload_dataloaders_every_n_epochs": 0},
}
"""The Trainer settings that distinguish runs, and their defaults. Other Trainer settings do not distinguish runs."""
