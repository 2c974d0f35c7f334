"""The `kvt` command: the Lightning CLI, and commands that use a trained model.

torch and Lightning take seconds to import, so a function that needs them imports them itself: --help and a mistyped
command answer at once.
"""

import os
import sys
from argparse import SUPPRESS
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import Any, get_args, get_origin

from kvt.system.console import OneLineParser, exit_on_signals, quick_imports, run, tell
from kvt.system.quoting import printable
from kvt.version import __version__

with exit_on_signals():
    from docstring_parser import parse
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    from kvt.cli.experiment import run_lightning
    from kvt.system.errors import UserError, require_positive, unknown
    from kvt.system.files import user_path


COMMANDS = {  # the import path of a function, and its line in `kvt --help`
    "generate": ("kvt.cli.main:generate", "continues a text with a model of characters, human numbers or language"),
    "translate": ("kvt.cli.main:translate", "translates sentences"),
    "maps": ("kvt.cli.main:maps", "draws attention maps of a trained model"),
    "runs": ("kvt.cli.runs:runs", "lists runs that were made, and draws their curves"),
    "runs rm": ("kvt.cli.runs:runs_rm", "removes some"),
    "show": ("kvt.cli.runs:show", "prints a run's card: its settings, its result, what to do with it"),
    "export": ("kvt.cli.main:export", "writes a trained model for others: safetensors, a card, ONNX"),
    "convert": ("kvt.cli.convert:convert", "gives a trained model another attention"),
    "import": ("kvt.cli.convert:import_model", "turns a GPT-2 of Hugging Face into a checkpoint"),
    "bench": ("kvt.cli.bench:bench", "measures what every attention costs"),
    "study run": ("kvt.cli.study:study_run", "makes the runs of a grid"),
    "study report": ("kvt.cli.study:study_report", "writes the report of a grid"),
    "study record": ("kvt.cli.study:study_record", "keeps the results of a grid, from any machines, in a record"),
    "reproduce": ("kvt.cli.study:reproduce", "makes the runs and writes the reports of the paper's tables and figures"),
    "completion": ("kvt.cli.completion:completion", "prints a script by which a shell completes all these words"),
}

LIGHTNING = {
    "run": "trains a model on a task, and tests it: kvt run reverse --attn kv",
    "fit": "trains a model on a task, or resumes a run",
    "validate": "measures a checkpoint on validation data",
    "test": "measures a checkpoint on test data",
    "predict": "writes what a checkpoint predicts, example by example",
}

INSTEAD = {
    "train": "run reverse --attn kv",
    **dict.fromkeys(("list", "ls"), "runs"),
    **{"report": "study report", "eval": "validate, or test", "rm": "runs rm"},
    **dict.fromkeys(("compare", "plot"), "runs --plot, or of a grid's runs, with statistics, kvt study report"),
}
"""Commands that a user of other programs may guess, and the one that does it here."""

SAMPLE = 256
"""Number of validation examples over which `kvt maps` averages."""

DESCRIPTION = """Train, validate, test and use the tasks of the Key-Value Transformer with any attention. kvt <command>
--help says more."""

EPILOG = """Each task has a YAML, which run takes by its name, or as a file of your own, and fit, validate, test and
predict by --config (-c); --print_config prints all that it comes to. Any setting of its model, its data or the Trainer
has a bare flag: --attn kv is --model.attn kv, --batch_size 64 is --data.batch_size 64, --max_epochs 2 is
--trainer.max_epochs 2, --seed 1 is --seed_everything 1. See "kvt run cifar10 --help" for those of a task."""


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
    """Continue a text with a model of characters, of human numbers, or of language.

    Args:
        ckpt_path: a checkpoint of the task characters, human_numbers or language_model.
        prompt: begins the text; default: the most frequent symbol.
        tokens: how many symbols to add at most: characters, words or a tokenizer's pieces.
        temperature: above 1 wilder, below 1 tamer, 0 always the likeliest symbol.
        top_k: draw among so many likeliest symbols only; default: among all.
        top_p: draw only among the likeliest symbols that together have this probability, 0.9; default: among all.
        stop: a text that ends what is added, such as "." or a line's end, $'\\n' in most shells; "<|endoftext|>": where
            a model of language ends the document.
        num_samples: how many texts, with a line --- between them; the first is that of one alone.
        seed: seed of the random numbers.
        attn: an attention of your own that the checkpoint was made with, my_attention.NearKV. It is imported only where
            you name it too, for that runs its code.
        model: likewise a task of your own, my_task.MyTask.
    """
    with quick_imports():
        from kvt.run.load_checkpoint import Checkpoint
        from kvt.tasks.language import LanguageTask

    require_positive(num_samples=num_samples)
    # not tuned: of a single row, torch's own products are twice as fast as those of training
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
    """Translate sentences, one line each.

    Args:
        sentences: to translate; default: the lines of standard input.
        ckpt_path: a checkpoint of the task translation.
        beam: how many beginnings of a translation are followed at once; 1 takes the likeliest word each time.
        attn: an attention of your own that the checkpoint uses, see kvt generate.
        model: a task of your own, likewise.
    """
    with quick_imports():
        from kvt.data.texts import decode_text
        from kvt.run.load_checkpoint import Checkpoint
        from kvt.system.hardware import tune
        from kvt.tasks import TranslationTask

    tune()
    task = Checkpoint(ckpt_path, {"attn": attn, "model": model}).load_task(TranslationTask).to(_device())
    if not sentences:
        text = decode_text(sys.stdin.buffer.read(), "standard input")
        sentences = tuple(text.removesuffix("\n").split("\n")) if text else ()
    # what the shell hands over need not be UTF-8
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
    """Draw the attention maps of a trained model for one input, or write a page to explore those of several.

    A row of the picture is a layer, a column a head. A map is bright where a token (row) attends to another (column).
    Above it, the asymmetry ‖A − Aᵀ‖ / ‖A‖ of its scores A before the softmax, and the mean entropy of its rows in nats.
    For images, the class token's attention is laid over the picture.

    A ring marks which token each one looks at: the largest weight off the diagonal, averaged over 256 examples. A line
    for each head says which cycles these looks form, how much of W_Q W_Kᵀ is symmetric, and where the eigenvalues of
    the drawn map are, which the last panel of a layer shows; see docs/symmetry.md. A causal map has none: its
    eigenvalues are its diagonal.

    With --html, one file for any browser, which needs no network: choose layer and head, step through examples, and
    point at a cell for its weight, at a token or patch for what it looks at and what looks at it.

    Args:
        ckpt_path: a checkpoint of any task, whose data must be there.
        prompt: a text of your own in place of an example, for a model that kvt generate takes; it needs no data.
        html: write such a page, maps.html unless --out names another.
        out: the picture, .png, .pdf or .svg, or the page, .html; default: maps.png.
        example: which one of the validation split; of a page, the first.
        examples: how many a page has, if the split has so many.
        data_dir: where data sets lie; default: where the run found them.
        root: where its folder lies now, if it has been moved.
        text: likewise its text.
        features: likewise its file of features.
        weights: likewise its weights of the backbone.
        attn: an attention of your own that the checkpoint uses, see kvt generate.
        model: a task of your own, likewise.
        data: data of your own, likewise.
    """
    with quick_imports():
        from kvt.run.load_checkpoint import Checkpoint
        from kvt.run.same import load_data
        from kvt.system.hardware import tune
        from kvt.tasks import Task
        from kvt.tasks.language import LanguageTask
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
        task_data = load_data(checkpoint, **{name: path for name, path in places.items() if path is not None})
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


def export(
    *runs: str,
    out: str,
    onnx: bool = False,
    push: str | None = None,
    attn: str | None = None,
    model: str | None = None,
    data: str | None = None,
) -> None:
    """Write a trained model for others, as the Hugging Face hub has them: model.safetensors, config.json, a card.

    Every command takes the folder as --ckpt_path, and kvt.load does; it has all that is needed to use the model, and
    nothing that is needed to go on training.

    Args:
        runs: a run's folder, whose best checkpoint is taken, or a checkpoint.
        out: the folder to write; an export that it has is replaced, other files in it stay.
        onnx: also write model.onnx, which takes batches of any size; the data must be there.
        push: also upload the files to the Hugging Face hub, OWNER/NAME; a new repository is private.
        attn: with --onnx, an attention of your own that the checkpoint uses, see kvt generate.
        model: a task of your own, likewise.
        data: data of your own, likewise.
    """
    with quick_imports():
        from kvt.exchange.export import export as write
        from kvt.exchange.export import export_onnx
        from kvt.exchange.export import push as upload
        from kvt.run.folder import run_of_checkpoint
        from kvt.run.load_checkpoint import Checkpoint

    if len(runs) != 1:
        raise UserError("kvt export takes one run: pass its folder, or a checkpoint")
    if push == "":
        raise UserError("--push: expected the repository, OWNER/NAME; is a variable unset?")
    checkpoint = Checkpoint(user_path(runs[0]), {"attn": attn, "model": model, "data": data}, flag="")
    folder = user_path(out)
    paths = write(checkpoint, run_of_checkpoint(checkpoint.path), folder)
    paths += export_onnx(checkpoint, folder) if onnx else []
    for path in paths:
        tell(printable(path))
    if push:
        tell(upload(paths, push))


def main() -> None:
    """Run the `kvt` command."""
    run(lambda: _run(sys.argv[1:]))


def _run(argv: Sequence[str]) -> None:
    names = (" ".join(argv[:count]) for count in (2, 1))
    if name := next((name for name in names if name in COMMANDS), None):
        execute(name, argv[len(name.split()) :])
    elif not argv:
        raise UserError("kvt needs a command: see kvt --help")
    elif argv[0] == "study" and not {"-h", "--help"} & {*argv}:
        raise UserError("kvt study needs a command: run, report or record")
    elif argv[0] in LIGHTNING:
        run_lightning(argv, description=LIGHTNING[argv[0]])
    elif argv[0] == "help":
        _run([*argv[1:], "--help"])
    elif argv[0] in ("-h", "--help", "--version", "study"):
        _help_parser().parse_args(argv[-1:])
    elif argv[0] in INSTEAD:
        raise UserError(f"unknown command {argv[0]!r}: it is kvt {INSTEAD[argv[0]]}")
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
    """Run one of `COMMANDS` with the words of the command line."""
    function, parser = command_parser(name)
    given = parser.parse_args(list(words)).as_dict()
    parameters = signature(function).parameters
    unnamed = [name for name, parameter in parameters.items() if parameter.kind is Parameter.VAR_POSITIONAL]
    positional = [word for name in unnamed for word in given.get(name, ())]
    function(*positional, **{name: given[name.rstrip("_")] for name in parameters if name not in unnamed})


def command_parser(name: str) -> tuple[Callable[..., None], ArgumentParser]:
    """Return the function of one of `COMMANDS`, and the parser of its flags.

    They are the function's parameters: a list takes many words, a truth value none. The flag of `from_`, as Python has
    to call it, is --from.
    """
    with quick_imports():
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
    """Return the arguments of `add_argument` for a function's parameter."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return {"nargs": "*", "default": SUPPRESS}  # any other is a part of the help
    if parameter.annotation is bool:
        return {"action": "store_true"}
    default = {"required": True} if parameter.default is Parameter.empty else {"default": parameter.default}
    if get_origin(parameter.annotation) is list:
        return {"nargs": "+", "type": get_args(parameter.annotation)[0], **default}
    is_text = parameter.annotation in (str, str | None)  # which stays as it is, whatever a parser would make of it
    return default if is_text else {"type": parameter.annotation, **default}


class _Parser(OneLineParser, ArgumentParser):
    pass


class _Help(DefaultHelpFormatter):
    """Formats help: wraps paragraphs, and keeps the lines of indented blocks, which are commands to copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith("    ") else fill(part, width, indent) for part in parts)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
