"""The `kvt` command: the Lightning CLI, and beside it what a trained model can be asked for."""

import os
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, get_args, get_origin

import torch
from docstring_parser import parse
from jsonargparse import ArgumentParser

from kvt.checkpoints import load_task
from kvt.cli import CLI, run
from kvt.data.texts import decode_text
from kvt.flags import OneLineErrors
from kvt.tasks import TranslationTask
from kvt.tasks.language import LanguageTask


def generate(
    ckpt_path: str,
    prompt: str = "",
    tokens: int = 500,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> None:
    """Continues a text with a model of characters or of human numbers.

    Args:
        ckpt_path: a checkpoint of experiments/characters.py or experiments/human_numbers.py.
        prompt: begins the text; default: the most frequent symbol.
        tokens: how many symbols to add.
        temperature: above 1 wilder, below 1 tamer, 0 always the likeliest symbol.
        top_k: draw among so many likeliest symbols only; default: among all.
        seed: of the random numbers.
    """
    task = load_task(ckpt_path, LanguageTask).to(_device())
    print(task.write(prompt, tokens, temperature, top_k, seed))


def translate(*sentences: str, ckpt_path: str, beam: int = 1) -> None:
    """Translates sentences, one line each.

    Args:
        sentences: to translate; default: the lines of standard input.
        ckpt_path: a checkpoint of experiments/translation.py.
        beam: how many beginnings of a translation are followed at once; 1 takes the likeliest word each time.
    """
    task = load_task(ckpt_path, TranslationTask).to(_device())
    if not sentences:
        text = decode_text(sys.stdin.buffer.read(), "standard input")
        sentences = tuple(text.removesuffix("\n").split("\n")) if text else ()
    # what the shell hands over need not be UTF-8
    sentences = tuple(decode_text(os.fsencode(text), f"sentence {n}") for n, text in enumerate(sentences, start=1))
    for translation in task.translate(sentences, beam, progress=True):
        print(translation)


COMMANDS: dict[str, Callable[..., None]] = {"generate": generate, "translate": translate}


def main() -> None:
    """The `kvt` command."""
    name, words = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    run(lambda: execute(name, words) if name in COMMANDS else CLI(sys.argv[1:]))


def execute(name: str, words: Sequence[str]) -> None:
    """Runs one of `COMMANDS` with the words of the command line.

    Its flags are the function's parameters: a list takes many words, a truth value none.

    Raises:
        UserError: a flag that is unknown, missing or wrong; whatever the command raises.
    """
    function = COMMANDS[name]
    said = parse(function.__doc__ or "")
    explained = {parameter.arg_name: parameter.description for parameter in said.params}
    parser = _Parser(prog=f"kvt {name}", description=said.description, allow_abbrev=False)
    unnamed = []
    for parameter in signature(function).parameters.values():
        many = parameter.kind is Parameter.VAR_POSITIONAL
        flag = parameter.name if many else f"--{parameter.name}"
        parser.add_argument(flag, help=explained[parameter.name], **_kind(parameter))
        unnamed += [parameter.name] if many else []
    settings = parser.parse_args(list(words)).as_dict()
    positional = [word for name in unnamed for word in settings.pop(name)]
    function(*positional, **settings)


def _kind(parameter: Parameter) -> dict[str, Any]:
    """What a parser must know of a function's parameter."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return {"nargs": "*", "type": parameter.annotation}
    if parameter.annotation is bool:
        return {"action": "store_true"}
    default = {"required": True} if parameter.default is Parameter.empty else {"default": parameter.default}
    if get_origin(parameter.annotation) is list:
        return {"nargs": "+", "type": get_args(parameter.annotation)[0], **default}
    return {"type": parameter.annotation, **default}


class _Parser(OneLineErrors, ArgumentParser):
    pass


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
