"""The `kvt` command: the Lightning CLI, and commands that use a trained model.

torch and Lightning take seconds to import. Functions therefore import these packages only when needed, so that the
help and the error for a mistyped command appear at once.
"""

import os
import sys
from argparse import SUPPRESS
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import Any, get_args, get_origin

from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from kvt.system import OneLineParser, UserError, printable, require_positive, run, tell, unknown, user_path
from kvt.version import __version__

COMMANDS = {  # maps a command to the import path of its function and to its line in `kvt --help`
    "generate": ("kvt.cli.main:generate", "continues a text with a trained language model"),
    "translate": ("kvt.cli.main:translate", "translates sentences with a trained model"),
    "maps": ("kvt.cli.main:maps", "draws attention maps of a trained model"),
    "runs": ("kvt.cli.runs:runs", "lists runs"),
    "convert": ("kvt.cli.convert:convert", "replaces the attention of a trained model"),
    "bench": ("kvt.bench:bench", "measures time, memory and FLOPs of each attention"),
    "study run": ("kvt.cli.study:study_run", "trains all runs of a grid"),
    "study report": ("kvt.cli.study:study_report", "writes the report of a grid"),
    "study record": ("kvt.cli.study:study_record", "collects the results of a grid, from any machines, in a record"),
    "reproduce": ("kvt.cli.study:reproduce", "trains the runs and writes the reports of the paper's results"),
}

LIGHTNING = {
    "run": "trains a model on a task, and tests it: kvt run reverse --attn kv",
    "fit": "trains a model on a task without testing it, or resumes a run",
    "validate": "measures a checkpoint on validation data",
    "test": "measures a checkpoint on test data",
    "predict": "writes a checkpoint's prediction for each example to a CSV",
}

SAMPLE = 256
"""Number of validation examples over which `kvt maps` averages."""

DESCRIPTION = """Train, test and use models with any attention on the tasks of the Key-Value Transformer. kvt <command>
--help shows the flags of a command."""

EPILOG = """Each task has a YAML file with its settings. kvt run takes the task's name or the path of your own YAML
file; fit, validate, test and predict take the same after --config (-c). --print_config prints the resolved
configuration. Every setting of model, data and Trainer has a short flag: --attn kv is --model.attn kv, --batch_size 64
is --data.batch_size 64, --max_epochs 2 is --trainer.max_epochs 2, --seed 1 is --seed_everything 1. "kvt run cifar10
--help" lists the flags of a task."""


def generate(
    ckpt_path: str,
    prompt: str = "",
    tokens: int = 500,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | None = None,
    num_samples: int = 1,
    seed: int = 0,
    attn: str | None = None,
    model: str | None = None,
) -> None:
    """Continue a text with a model of the task characters, human_numbers or language_model.

    Args:
        ckpt_path: path to a checkpoint of the task characters, human_numbers or language_model.
        prompt: beginning of the text; default: the most frequent token.
        tokens: largest number of tokens to add: characters, words, or pieces of a tokenizer.
        temperature: sampling temperature; 0 picks the most likely token.
        top_k: number of most likely tokens from which to sample; default: all tokens.
        top_p: sample from the most likely tokens whose probabilities have this sum, such as 0.9; default: all tokens.
        stop: text at which generation stops, such as "." or a newline, $'\\n' in most shells. For language_model,
            "<|endoftext|>" is the end of a document.
        num_samples: number of texts. A line --- separates the texts. The first text does not depend on this number.
        seed: random seed.
        attn: import path of your attention class, such as my_attention.NearKV, if the checkpoint uses one. kvt imports
            only classes that you name, because importing a file runs its code.
        model: import path of your task class, such as my_task.MyTask, if the checkpoint uses one.
    """
    from kvt.run.load_checkpoint import Checkpoint
    from kvt.tasks.language import LanguageTask

    require_positive(num_samples=num_samples)
    # does not call `tune`: for a batch of one, torch's default matrix products are twice as fast as oneDNN's
    task = Checkpoint(ckpt_path, {"attn": attn, "model": model}).load_task(LanguageTask).to(_device())
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for number in range(num_samples):
        if number:
            tell("---")
        for text in task.write(prompt, tokens, seed + number, stop, **settings):
            tell(text, end="")
        tell("")


def translate(
    *sentences: str, ckpt_path: str, beam: int = 1, attn: str | None = None, model: str | None = None
) -> None:
    """Translate sentences, and print each translation in one line.

    Args:
        sentences: sentences to translate; default: the lines of standard input.
        ckpt_path: path to a checkpoint of the task translation.
        beam: width of beam search; 1 is greedy search.
        attn: import path of your attention class, such as my_attention.NearKV, if the checkpoint uses one.
        model: import path of your task class, such as my_task.MyTask, if the checkpoint uses one.
    """
    from kvt.data.texts import decode_text
    from kvt.run.load_checkpoint import Checkpoint
    from kvt.tasks import TranslationTask
    from kvt.tune import tune

    tune()
    task = Checkpoint(ckpt_path, {"attn": attn, "model": model}).load_task(TranslationTask).to(_device())
    if not sentences:
        text = decode_text(sys.stdin.buffer.read(), "standard input")
        sentences = tuple(text.removesuffix("\n").split("\n")) if text else ()
    # raises UserError for an argument that is not UTF-8
    sentences = tuple(decode_text(os.fsencode(text), f"sentence {n}") for n, text in enumerate(sentences, start=1))
    for translation in task.translate(sentences, beam, progress=True):
        tell(translation)


def maps(
    ckpt_path: str,
    prompt: str | None = None,
    html: bool = False,
    out: str | None = None,
    example: int = 0,
    examples: int = 8,
    data_dir: str | None = None,
    root: str | None = None,
    text: str | None = None,
    features: str | None = None,
    weights: str | None = None,
    attn: str | None = None,
    model: str | None = None,
    data: str | None = None,
) -> None:
    """Draw the attention maps of a trained model for one input, or write a page to explore the maps of several inputs.

    A row of the picture is a layer. A column is a head. A map is bright where the token of a row attends to the token
    of a column. The title of a map has the asymmetry ‖A − Aᵀ‖ / ‖A‖ of its scores A before the softmax, and the mean
    entropy of its rows in nats. For images, the picture also shows the attention of the class token to the image.

    For each token, a ring marks the other token with the largest weight, averaged over 256 examples. The command prints
    one line for each head, with the cycles in which tokens attend to each other, the symmetric part of W_Q W_Kᵀ, and
    the eigenvalues of the drawn map; see docs/symmetry.md. The last panel of a layer shows the eigenvalues. Causal maps
    have no such panel, because the eigenvalues of a causal map are its diagonal.

    --html writes one HTML file that works in any browser without a network. On the page, choose a layer and a head,
    and step through examples. Point at a cell to see its weight, or at a token or patch to see the tokens that it
    attends to, and the tokens that attend to it.

    Args:
        ckpt_path: path to a checkpoint of any task. The command needs the data of the run.
        prompt: text to use in place of an example, for the models of kvt generate. A prompt needs no data.
        html: write an HTML page; its default path is maps.html.
        out: path of the picture, .png, .pdf or .svg, or of the page, .html; default: maps.png.
        example: number of the validation example; with --html, the number of the first example.
        examples: with --html, the number of examples on the page, at most the size of the validation split.
        data_dir: folder of the data sets; default: the folder that the run used.
        root: new path of the run's data folder, if you moved the folder.
        text: new path of the run's text, if you moved the text.
        features: new path of the run's feature file, if you moved the file.
        weights: new path of the weights of the backbone, if you moved the weights.
        attn: import path of your attention class, such as my_attention.NearKV, if the checkpoint uses one.
        model: import path of your task class, such as my_task.MyTask, if the checkpoint uses one.
        data: import path of your data class, such as my_task.MyData, if the checkpoint uses one.
    """
    from kvt.run.load_checkpoint import Checkpoint
    from kvt.tasks import Task
    from kvt.tasks.language import LanguageTask
    from kvt.tune import tune
    from kvt.view import maps as plots
    from kvt.view.viewer import ENDING, save_page

    tune()
    require_positive(examples=examples)
    default = f"maps{ENDING if html else plots.FORMATS[0]}"
    path = plots.require_ending(
        user_path(default if out is None else out), [ENDING] if html else [*plots.FORMATS, ENDING]
    )
    is_page = path.suffix.lower() == ENDING
    checkpoint = Checkpoint(ckpt_path, {"attn": attn, "model": model, "data": data})
    kind: Any = Task if prompt is None else LanguageTask
    task = checkpoint.load_task(kind).to(_device())
    if prompt is None:
        places = {"data_dir": data_dir, "root": root, "text": text, "features": features, "weights": weights}
        task_data = checkpoint.load_data(**{name: path for name, path in places.items() if path is not None})
        batches = task_data.examples(example, examples if is_page else 1)
        title = f"{task_data.task_name}, {task.attn}"
    else:
        batches, title = iter([task.batch_of(prompt)]), task.attn
    examined = [plots.examine(task, batch, number) for number, batch in enumerate(batches, start=example)]
    if not examined[0].layers:
        remedy = "derive one from it, and override attention_weights, as docs/guides/attention.md shows"
        raise UserError(f"--ckpt_path {ckpt_path}: no layer is a kvt.attention.Attention, so there is no map: {remedy}")
    layers = examined[0].layers
    if prompt is None:
        layers = plots.add_looks(layers, task, task_data.sample(SAMPLE))
    for line in plots.describe_looks(layers):
        tell(line)
    if is_page:
        save_page(examined, title, ckpt_path, path)
    else:
        plots.save(plots.draw(layers, plots.titled(title, examined[0].caption)), path)
    tell(printable(path))


def main() -> None:
    """Run the `kvt` command."""
    run(lambda: _run(sys.argv[1:]))


def _run(argv: Sequence[str]) -> None:
    names = (" ".join(argv[:count]) for count in (2, 1))
    if name := next((name for name in names if name in COMMANDS), None):
        execute(name, argv[len(name.split()) :])
    elif not argv:
        raise UserError("kvt needs a command: see kvt --help")
    elif argv[0] in LIGHTNING:
        from kvt.cli.lightning_cli import run_words

        run_words(argv, description=LIGHTNING[argv[0]])
    elif argv[-1] in ("-h", "--help", "--version"):
        _help_parser().parse_args(argv[-1:])
    else:
        raise unknown("command", argv[0], [*LIGHTNING, *COMMANDS])


def _help_parser() -> PlainParser:
    """Return the parser of `kvt --help` and `kvt --version`."""
    parser = PlainParser("kvt", "kvt <command> [flags]", DESCRIPTION, EPILOG)
    parser.add_argument("--version", action="version", version=f"kvt {__version__}")
    commands = parser.add_argument_group("commands")
    for name, about in (LIGHTNING | {name: about for name, (_, about) in COMMANDS.items()}).items():
        commands.add_argument(name, help=about)
    return parser


def execute(name: str, words: Sequence[str]) -> None:
    """Run the command `name` of `COMMANDS` with the words of the command line."""
    function, parser = command_parser(name)
    given = parser.parse_args(list(words)).as_dict()
    parameters = signature(function).parameters
    unnamed = [name for name, parameter in parameters.items() if parameter.kind is Parameter.VAR_POSITIONAL]
    positional = [word for name in unnamed for word in given.get(name, ())]
    function(*positional, **{name: given[name.rstrip("_")] for name in parameters if name not in unnamed})


def command_parser(name: str) -> tuple[Callable[..., None], ArgumentParser]:
    """Return the function of the command `name` of `COMMANDS`, and the parser of its flags.

    Each parameter of the function is a flag. The flag of a list takes several words, the flag of a bool no word. The
    parameter `from_` has the flag --from, because `from` is a keyword of Python.
    """
    function: Callable[..., None] = resolve_name(COMMANDS[name][0])
    said = parse(function.__doc__ or "")
    explained = {parameter.arg_name: parameter.description for parameter in said.params}
    parser = _Parser(prog=f"kvt {name}", description=said.description, allow_abbrev=False, formatter_class=_Help)
    for parameter in signature(function).parameters.values():
        many = parameter.kind is Parameter.VAR_POSITIONAL
        flag = parameter.name if many else f"--{parameter.name.rstrip('_')}"
        parser.add_argument(flag, help=explained[parameter.name], **_kind(parameter))
    return function, parser


def _kind(parameter: Parameter) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a parameter of a function."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return {"nargs": "*", "default": SUPPRESS}  # --help would print any other default
    if parameter.annotation is bool:
        return {"action": "store_true"}
    default = {"required": True} if parameter.default is Parameter.empty else {"default": parameter.default}
    if get_origin(parameter.annotation) is list:
        return {"nargs": "+", "type": get_args(parameter.annotation)[0], **default}
    is_text = parameter.annotation in (str, str | None)  # without a type, the parser does not convert the text
    return default if is_text else {"type": parameter.annotation, **default}


class _Parser(OneLineParser, ArgumentParser):
    pass


class _Help(DefaultHelpFormatter):
    """A help formatter that wraps paragraphs. It keeps the lines of indented blocks, which are commands to copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith("    ") else fill(part, width, indent) for part in parts)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
