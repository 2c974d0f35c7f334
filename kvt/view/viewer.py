"""An HTML page to explore attention maps in a browser, in one file that loads no other files."""

import json
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from kvt.system import write_atomically
from kvt.view.maps import Example, Layer, describe

ENDING = ".html"
TEMPLATE = Path(__file__).with_name("viewer.html")
LEVELS = 65535  # 16-bit integer for the largest weight of a map; smaller weights are in proportion, negative ones 0


def save_page(examples: Sequence[Example], title: str, checkpoint: str, path: Path) -> None:
    """Write a page with the attention maps of several examples."""
    shown = [_example(*example) for example in examples]
    data = json.dumps({"title": title, "checkpoint": checkpoint, "examples": shown}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # otherwise a text could end the <script>
    write_atomically(path, TEMPLATE.read_text(encoding="utf-8").replace("{data}", data))


def _example(number: int, caption: str, layers: Sequence[Layer]) -> dict[str, Any]:
    overlay = layers[0].overlay
    picture = overlay and {"source": _data_url(overlay[0]), "grid": overlay[1].shape[1:]}
    return {"number": number, "caption": caption, "picture": picture, "layers": [_layer(layer) for layer in layers]}


def _layer(layer: Layer) -> dict[str, Any]:
    rows, columns = layer.labels or ([str(n + 1) for n in range(size)] for size in layer.weights.shape[1:])
    heads = []
    for head, weights in enumerate(layer.weights):
        largest = weights.clamp(min=0).max().item()
        levels = (weights.clamp(min=0) / (largest or 1) * LEVELS).round().numpy().astype("<u2")
        numbers = describe(weights, None if layer.scores is None else layer.scores[head])
        heads.append({"numbers": numbers, "largest": largest, "weights": b64encode(levels.tobytes()).decode()})
    return {"name": layer.name, "rows": rows, "columns": columns, "heads": heads}


def _data_url(picture: Tensor) -> str:
    """Encode a picture, uint8 (H, W, C), as the data URL of a PNG."""
    file = BytesIO()
    Image.fromarray(picture.squeeze(-1).numpy()).save(file, "png")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
