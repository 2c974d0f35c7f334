"""The experiment scripts: a configuration chosen by name, trained, tested and recorded."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc import locate

from kvt.system.console import exit_on_ctrl_c, quick_imports, run

with exit_on_ctrl_c():
    import yaml
    from jsonargparse import ArgumentParser

    from kvt.system.errors import unknown

TRAINER_FLAGS = ("max_epochs", "precision", "accelerator", "devices", "default_root_dir", "fast_dev_run")
"""What `--help` shows of the Trainer's many."""


def experiment(script: str, description: str, choices: Sequence[str], option: str | None = None) -> None:
    """Runs the experiment of a script under experiments/, by the words of the command line.

    Args:
        script: its `__file__`; the configurations lie beside it, configs/<choice>.yaml.
        description: what `--help` begins with.
        choices: their names, the default first.
        option: the flag that chooses among them, where there are several.
    """
    run(lambda: _experiment(Path(script), description, choices, option))


def _experiment(script: Path, description: str, choices: Sequence[str], option: str | None) -> None:
    with quick_imports():
        from kvt.fleet.launch import run_cli
        from kvt.training.flags import take, take_checkpoint

    named, argv = take(sys.argv[1:], option) if option else (None, sys.argv[1:])
    chosen = choices[0] if named is None else named
    if option and chosen not in choices:
        raise unknown(option, chosen, choices)
    config = script.resolve().parent / "configs" / f"{chosen}.yaml"
    if {"-h", "--help"} & set(argv):
        _print_help(script, description, choices, option, config)
    elif take(argv, "resume")[0] is not None:
        run_cli(["fit", *sys.argv[1:]], test=True)  # the run knows its configuration
    elif named is None and take(argv, "ckpt_path")[0] is not None:
        if (checkpoint := take_checkpoint(argv)[0]) is not None:  # it says all of its run, which is of this kind
            _ = replace(checkpoint, kind=_class_of(config, "model")).task_class
        run_cli(["fit", *argv], test=True)
    else:
        run_cli(["fit", f"--config={config}", *argv], test=True)


def _print_help(script: Path, description: str, choices: Sequence[str], option: str | None, config: Path) -> None:
    import lightning as L

    from kvt.training.lightning_cli import COMPILE_HELP

    settings = yaml.safe_load(config.read_text())
    parser = ArgumentParser(
        prog=f"python {script}",
        usage="%(prog)s [flags]",
        description=description,
        epilog=f"Defaults are those of {config.name}. Every other flag of the Trainer works too (kvt fit --help), and "
        "so does --config FILE, the config.yaml of an earlier run for one.",
    )
    if option:
        parser.add_argument(f"--{option}", choices=choices, default=choices[0], help="chooses the configuration")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, data and all randomness")
    parser.add_argument("--compile", type=bool, default=False, help=COMPILE_HELP)
    parser.add_argument("--resume", help="goes on with a run that was killed or stopped: its folder; exactly")
    parser.add_argument("--fleet", type=int, help="how many runs to train as one, with seeds from --seed upwards")
    for group, hidden in (("model", {"spec"}), ("data", {"seed", option})):
        parser.add_class_arguments(_class_of(config, group), skip=hidden)
        parser.set_defaults({k: v for k, v in settings[group].get("init_args", {}).items() if k not in hidden})
    parser.add_class_arguments(L.Trainer, skip=set(inspect.signature(L.Trainer).parameters) - set(TRAINER_FLAGS))
    parser.set_defaults({k: v for k, v in settings["trainer"].items() if k in TRAINER_FLAGS})
    parser.print_help()


def _class_of(config: Path, section: str) -> type:
    cls = locate(yaml.safe_load(config.read_text())[section]["class_path"])
    assert isinstance(cls, type)
    return cls
