"""Put the best weights of a run into the zoo, in half precision, with a card: python zoo/pack.py NAME RUN."""

import json
import sys
from pathlib import Path

import torch

from kvt.run.folder import BEST
from kvt.run.load_checkpoint import read_checkpoint
from kvt.system import table

ZOO = Path(__file__).parent
LEFT_OUT = ("callbacks", "loops", "lr_schedulers", "optimizer_states")  # what only a resumed run needs
LICENCES = {
    "Characters": "Shakespeare's works are in the public domain; the file is that of karpathy/char-rnn (MIT licence).",
}
GENERATED = "The data are generated: they have no licence."
CARD = """\
# {name}

`kvt.load("zoo/{name}.ckpt")`: `{task}` with `--attn {attn}`, trained on {data}.

```
{numbers}
```

| setting | |
|---|---|
{settings}

Made by `kvt fit --config {config} {flags}`, on {processor}, with torch {torch}. The numbers are
those of the run, in single precision; the weights here are in half precision. {licence}
"""


def pack(name: str, run: Path) -> None:
    """Write `name`.ckpt and its card, `name`.md, from the folder of a finished run."""
    checkpoint = read_checkpoint(run / BEST)
    for key in LEFT_OUT:
        checkpoint.pop(key, None)
    checkpoint["state_dict"] = {key: weight.half() for key, weight in checkpoint["state_dict"].items()}
    torch.save(checkpoint, ZOO / f"{name}.ckpt")
    result = json.loads((run / "result.json").read_text())
    config = checkpoint["config"]
    task, data = (config[part]["class_path"].rpartition(".")[2] for part in ("model", "data"))
    settings = {**config["data"]["init_args"], **config["model"]["init_args"]}
    shown = {key: value for key, value in settings.items() if value is not None}
    numbers = {key: value for key, value in result.items() if "/" in key or key == "parameters"}
    lengths = {key: config["trainer"].get(key) for key in ("max_epochs", "max_steps")}
    flags = [f"--attn {result['attn']}", *(f"--{key} {value}" for key, value in lengths.items() if value and value > 0)]
    text = CARD.format(
        **{"name": name, "task": task, "data": data, "attn": result["attn"], "numbers": table(numbers)},
        settings="\n".join(f"| `{key}` | {value} |" for key, value in shown.items()),
        config=result["task"],
        flags=" ".join(flags),
        licence=LICENCES.get(data, GENERATED),
        processor=result["machine"]["processor"],
        torch=result["packages"]["torch"],
    )
    (ZOO / f"{name}.md").write_text(text)


if __name__ == "__main__":
    pack(sys.argv[1], Path(sys.argv[2]))
