"""The pages that say `<!-- generated -->`: all commands and all settings, as the parsers know them, and the zoo."""

import re
import runpy
from argparse import Action
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from kvt.commands import COMMANDS, LIGHTNING, RUN_FLAGS, command_parser, experiment
from kvt.run.cli import HELP, settings_parser
from kvt.run.config import RunConfig
from kvt.run.sections import BUILT
from kvt.system import CONFIGS, yaml_names

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
ZOO = EXPERIMENTS.with_name("zoo")
NO_SETTINGS = ("help", "print_config", "config", "model", "data", "trainer", "model.spec", "data.seed")


def commands() -> Iterator[str]:
    """Return every command with its flags, in the order of `kvt --help`."""
    for name, about in LIGHTNING.items():
        begin = f"## kvt {name}\n\n{about[0].upper()}{about[1:]}."
        yield f"{begin} It takes the [flags of a run](#flags-of-a-run) and all [settings of its task](settings.md)."
    yield "## Flags of a run\n\nOf these commands, and of the scripts in `experiments/`:"
    flags_of_run = {f"--{name}": HELP[name] for name in RUN_FLAGS}
    flags_of_run["--print_config"] = "print all settings that the words come to, as YAML, and do nothing else"
    yield "\n\n".join(entry(f"`{flag}`", prose(text)) for flag, text in flags_of_run.items())
    for name in COMMANDS:
        _, parser = command_parser(name)
        yield f"## kvt {name}\n\n{prose(parser.description)}\n\n{flags(parser._actions)}"
    yield "## Scripts of experiments\n\nEach is `kvt run` with a choice of tasks."
    for script in sorted(EXPERIMENTS.glob("*.py")):
        if called := call_of(script):
            about, names, option = called["description"], called["choices"], called.get("option")
            choice = f" `--{option}` is one of {', '.join(f'`{name}`' for name in names)}." if option else ""
            yield entry(f"`python experiments/{script.name}`", prose(about) + choice)


def call_of(script: Path) -> dict[str, Any] | None:
    """Return the arguments of `experiment` that a script of experiments/ calls it with; None if it is another kind."""
    if "import experiment\n" not in script.read_text():
        return None
    with patch("kvt.commands.experiment") as called:
        runpy.run_path(str(script), run_name="__main__")
    return signature(experiment).bind(*called.call_args.args, **called.call_args.kwargs).arguments


def settings() -> Iterator[str]:
    """Return the settings of every task and its data, with the values of the YAML files, and those of the Trainer."""
    families: dict[tuple[str, str], dict[str, RunConfig]] = {}
    for name in yaml_names(CONFIGS):
        config = RunConfig.from_name(name)
        families.setdefault((config.model["class_path"], config.data["class_path"]), {})[name] = config
    for (model, data), configs in families.items():
        actions = settings_parser(next(iter(configs.values())).classes)._actions
        yield f"## {', '.join(configs)}"
        yield f"### `{model}` (`model`)\n\n{definitions(actions, 'model', configs)}"
        yield f"### `{data}` (`data`)\n\n{definitions(actions, 'data', configs)}"
    yield "## Of every run\n\n" + definitions(actions, "", {})
    said = "Lightning's settings and help, with kvt's defaults. The YAML of a task may say otherwise: how many epochs."
    yield f"## The Trainer (`trainer`)\n\n{said}\n\n{definitions(actions, 'trainer', {})}"


def definitions(actions: Iterable[Action], section: str, configs: dict[str, RunConfig]) -> str:
    """Return the settings of a section ("": of no section), with the values of the configurations."""
    found = []
    for action in actions:
        place, dot, name = action.dest.partition(".")
        if action.dest in NO_SETTINGS or (place if dot else "") != section or "." in name:
            continue
        tasks: dict[str, list[str]] = {}  # by the value in their YAML
        for task, config in configs.items():
            tasks.setdefault(value_of(settings_of(config, section)[name]), []).append(task)
        value = " · ".join(f"{value} ({', '.join(names)})" for value, names in tasks.items())
        value = value if len(tasks) > 1 else next(iter(tasks), value_of(action.default))
        found.append(entry(f"`{name or place}` {type_of(action)} = {value}", prose(action.help)))
    return "\n\n".join(found)


def settings_of(config: RunConfig, section: str) -> dict[str, Any]:
    part: dict[str, Any] = getattr(config, section)
    return part["init_args"] if section in BUILT else part


def zoo() -> Iterator[str]:
    """Return the first page of the zoo, and the card of each model."""
    yield re.sub(r"\]\((.+?)\.md\)", lambda link: f"](#{link[1].replace('+', '')})", (ZOO / "README.md").read_text())
    for card in sorted(ZOO.glob("*-*.md")):
        yield f"#{card.read_text()}"


def flags(actions: Iterable[Action]) -> str:
    """Return the flags of a command, and the words that it takes without one."""
    found = []
    for action in actions:
        if action.dest == "help":
            continue
        flag = action.option_strings[0] if action.option_strings else action.dest.upper()
        has_default = action.nargs != 0 and action.default is not None and action.default not in ("", [])
        is_required = action.required and flag.startswith("-")
        told = f" = {value_of(action.default)}" if has_default else ", required" * is_required
        found.append(entry(f"`{flag}` {type_of(action)}{told}", prose(action.help)))
    return "\n\n".join(found)


def entry(term: str, text: str) -> str:
    return f"{term}\n: " + text.replace("\n\n", "\n\n  ")


def type_of(action: Action) -> str:
    """Return what a setting or a flag takes, without the packages of classes; nothing for a flag without a value."""
    if action.nargs == 0:
        return ""
    hint: Any = getattr(action, "_typehint", None) or action.type or str
    words = re.sub(r"[\w.]+\.(\w+)", r"\1", hint.__name__ if isinstance(hint, type) else str(hint))
    words = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", words.replace("NoneType", "None"))
    words = re.sub(r"dict\[.*\]", "dict", words)
    words = re.sub(r"^Union\[(.*)\]$", lambda found: found[1].replace(", ", " | "), words)
    words = re.sub(r"Literal\[([^\]]*)\]", lambda found: found[1].replace("'", "").replace(",", " |"), words)
    return f"*{prose(words)}{' …' * (action.nargs in ('+', '*'))}*"


def value_of(value: Any) -> str:
    """Return a value as a YAML has it, in one line, as code."""
    text = yaml.safe_dump(value, default_flow_style=True, width=inf).removesuffix("\n...\n").strip()
    return f"`{text}`"


def prose(text: str | None) -> str:
    """Return a help text as Markdown: paragraphs stay, what is not code is escaped."""
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    return "\n\n".join(_escaped(" ".join(paragraph.split())) for paragraph in paragraphs)


def _escaped(text: str) -> str:
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]$|#~])", r"\\\1", part) for part in parts)


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "reference/commands": commands,
    "reference/settings": settings,
    "zoo": zoo,
}


def fill(app: Sphinx, page: str, content: list[str]) -> None:
    if page in PARTS:
        content[0] = content[0].replace("<!-- generated -->", "\n\n".join(PARTS[page]()))


def always(app: Sphinx, env: BuildEnvironment, *changes: set[str]) -> list[str]:
    """Return the pages that are read again at every build: nobody tells Sphinx that a parser has changed."""
    return [*PARTS]


def draw_dashes(app: Sphinx, page: nodes.document) -> None:
    """Put a dash where Sphinx writes two hyphens: between an argument and what it means. It would by smartquotes."""
    for text in [*page.findall(nodes.Text)]:
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("doctree-read", draw_dashes)
    app.connect("env-get-outdated", always)
    return {"parallel_read_safe": True}
