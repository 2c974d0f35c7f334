"""What a trained model can be asked for: `kvt generate` and `kvt translate`. A checkpoint alone is enough."""

import os
import sys
from collections.abc import Callable, Sequence
from inspect import signature

import torch
from jsonargparse import ArgumentParser

from kvt.checkpoints import load_task
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


def execute(name: str, words: Sequence[str]) -> None:
    """Runs one of `COMMANDS` with the words of the command line.

    Raises:
        UserError: a flag that is unknown, missing or wrong; whatever the command raises.
    """
    function = COMMANDS[name]
    parser = _Parser(prog=f"kvt {name}", description="From a checkpoint alone.", allow_abbrev=False)
    parser.add_function_arguments(function)
    positional = [p.name for p in signature(function).parameters.values() if p.kind is p.VAR_POSITIONAL]
    for many in positional:
        parser.add_argument(many, nargs="*", default=[], help="default: the lines of standard input")
    settings = parser.parse_args(list(words)).as_dict()
    unnamed = [word for many in positional for word in settings.pop(many)]
    function(*unnamed, **settings)


class _Parser(OneLineErrors, ArgumentParser):
    pass


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
