"""`KvtCLI`: the Lightning CLI with a task's YAML file, short flags (--lr for --model.lr) and errors of one line."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from kvt.run.config import RunConfig
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.parser import Parser, parse
from kvt.run.sections import BUILT, GROUPS, Config
from kvt.tasks.datamodule import classes_of
from kvt.tune import tune


class KvtCLI(LightningCLI):
    """Parses a configuration and the words of a command line, and makes data and task: `datamodule` and `model`.

    `kvt.run.fit.make_trainer` makes the Trainer.

    Args:
        config: the configuration, in the form of config.yaml.
        words: flags, which override the configuration.
        checkpoint: the checkpoint from which `config` was read.
        texts: prog and description for --help.

    Attributes:
        run_config: the configuration with all settings.
    """

    def __init__(
        self, config: Config, words: Sequence[str] = (), checkpoint: Checkpoint | None = None, **texts: str
    ) -> None:
        tune()
        self.given, self.checkpoint = config, checkpoint
        self.classes = classes_of(config)
        super().__init__(
            self.classes["model"],
            self.classes["data"],
            save_config_callback=None,
            seed_everything_default=0,
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False, **texts},
            parser_class=Parser,
            args=[*words],
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add nothing: `Parser.add_settings` adds --seed_everything."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_settings(self.classes)  # type: ignore[attr-defined]

    def parse_arguments(self, parser: Any, args: Any) -> None:
        if {"-h", "--help"} & {*args}:  # the help shows the values of the configuration as defaults
            groups = self.given | {name: self.given[name]["init_args"] for name in BUILT}
            values = [(f"{group}.{name}", value) for group in GROUPS for name, value in groups.get(group, {}).items()]
            parser.set_defaults({name: value for name, value in values if not isinstance(value, dict)})
        self.config, content = parse(parser, self.given, args)
        self.run_config = RunConfig(**content)

    def instantiate_classes(self) -> None:
        """Make data and task. `LightningCLI` would also make the Trainer, whose callbacks need both."""
        with self.checkpoint.add_path() if self.checkpoint else nullcontext():
            self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule, self.model = self.config_init.data, self.config_init.model
        self.model.run_config = self.run_config.as_dict()

    @cached_property
    def start(self) -> Checkpoint | None:
        """The checkpoint to measure, or to start training from; None if the configuration names no checkpoint."""
        path = self.run_config.ckpt_path
        return self.checkpoint or (None if path is None else Checkpoint(path))
