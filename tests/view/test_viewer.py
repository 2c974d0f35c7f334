"""The page of attention maps holds what the model computed, whatever its tokens are, and works in a browser."""

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kvt.commands import execute
from kvt.run.load_checkpoint import Checkpoint, load
from kvt.view.maps import Example, Layer, collect_maps, describe
from kvt.view.viewer import LEVELS, TEMPLATE, save_page

HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--", "\"'`&amp;\\", "\u2028"]
HOSTILE += ["\u202ertl", "\0", "\ud800", "{data}", "شيء", "x" * 300]


def a_layer(heads: int, rows: list[str], columns: list[str], seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    weights = (3 * torch.randn(heads, len(rows), len(columns))).softmax(-1)
    scores = weights.log() if rows == columns else None
    return Layer("encoder.0.attention", weights, scores, (rows, columns), None)


def saved(path: Path, *examples: list[Layer]) -> str:
    save_page([Example(n, "", layers) for n, layers in enumerate(examples, start=4)], "task, attn", "best.ckpt", path)
    return path.read_text(encoding="utf-8")


def embedded(page: str) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def require_same(held: dict, layer: Layer) -> None:
    """Make sure that a layer is held, its weights to half a step."""
    assert held["name"] == layer.name
    if layer.labels:
        assert (held["rows"], held["columns"]) == layer.labels
    for n, (head, weights) in enumerate(zip(held["heads"], layer.weights, strict=True)):
        levels = np.frombuffer(b64decode(head["weights"]), "<u2").reshape(weights.shape)
        assert head["largest"] == weights.max()
        np.testing.assert_allclose(levels / LEVELS * head["largest"], weights, atol=0.51 / LEVELS, rtol=0)
        assert head["numbers"] == describe(weights, None if layer.scores is None else layer.scores[n])


@pytest.mark.parametrize("config", ["reverse", "mnist", "anomaly", "human_numbers", "translation"])
def test_a_page_holds_the_maps_of_its_examples(in_tmp_dir, trained, config):
    last = str(trained(config))
    execute("maps", ["--ckpt_path", last, "--html", "--example", "1", "--examples", "3"])
    found = embedded(Path("maps.html").read_text())
    data = Checkpoint(last).load_data()
    assert found["title"].startswith(data.task_name)
    assert found["checkpoint"] == last
    assert [example["number"] for example in found["examples"]] == [1, 2, 3]
    for example in found["examples"]:
        batch = data.example(example["number"])
        layers = collect_maps(load(last), batch)
        if config in ("mnist", "anomaly"):
            names = data.spec.get("classes", range(data.spec.get("set_size", 0)))
            true, predicted = names[batch[1]], names[load(last).predict(batch[0])]
            assert example["caption"] == f"true {true}, predicted {predicted}"
        else:
            assert example["caption"] == ""
        for held, layer in zip(example["layers"], layers, strict=True):
            require_same(held, layer)
        if overlay := layers[0].overlay:
            png = b64decode(example["picture"]["source"].removeprefix("data:image/png;base64,"))
            np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(png))), overlay[0].squeeze(-1))
            assert example["picture"]["grid"] == [*overlay[1].shape[1:]]
        else:
            assert example["picture"] is None


def test_the_ending_chooses_a_page_and_it_ends_with_the_split(in_tmp_dir, trained):
    execute("maps", ["--ckpt_path", str(trained("reverse")), "--out", "mine.HTML", "--example", "18"])
    assert [example["number"] for example in embedded(Path("mine.HTML").read_text())["examples"]] == [18, 19]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (200, 3)])
def test_any_shape_is_held(tmp_path, rows, columns):
    layer = a_layer(1, [*map(str, range(rows))], [*map(str, range(columns))])
    blank = layer._replace(weights=torch.zeros_like(layer.weights), labels=None)
    shown = embedded(saved(tmp_path / "maps.html", [layer, blank]))["examples"][0]["layers"]
    require_same(shown[0], layer)
    require_same(shown[1], blank)
    assert shown[1]["rows"] == [str(n) for n in range(1, rows + 1)]


def test_hostile_tokens_stay_within_the_data(tmp_path):
    page = saved(tmp_path / "maps.html", [a_layer(1, HOSTILE, HOSTILE)])
    template = TEMPLATE.read_text()
    assert re.sub(r'(?<=id="data">).*?(?=</script>)', "{data}", page, flags=re.DOTALL) == template
    assert page.isascii() == template.isascii()
    assert embedded(page)["examples"][0]["layers"][0]["rows"] == HOSTILE


def test_a_page_loads_nothing():
    template = TEMPLATE.read_text()
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in template
    assert not re.search(r"://|url\(|@import|<link|<script src|innerHTML|outerHTML|insertAdjacent|eval", template)


class Opened:
    """A page in a browser."""

    def __init__(self, driver, path: Path, width: int = 1200) -> None:
        self.driver = driver
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(path.absolute().as_uri())

    def all(self, selector: str) -> list:
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [self.ask("return arguments[0].textContent.toWellFormed()", found) for found in self.all(selector)]

    def text(self, selector: str) -> str:
        (text,) = self.texts(selector)
        return text

    def ask(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def press(self, key: str, selector: str = "body") -> None:
        from selenium.webdriver.common.keys import Keys

        self.all(selector)[0].send_keys(getattr(Keys, key))

    def point(self, selector: str, down: float, right: float) -> None:
        """Move the mouse to a place of an element, from 0 to 1."""
        from selenium.webdriver.common.action_chains import ActionChains

        (target,) = self.all(selector)
        self.ask("arguments[0].scrollIntoView({block: 'center'})", target)
        x, y = (int(target.size[side] * (place - 0.5)) for side, place in (("width", right), ("height", down)))
        ActionChains(self.driver, duration=0).move_to_element_with_offset(target, x, y).perform()

    def marked(self) -> dict[str, list[int]]:
        """Return the indices of the marked tokens of each list."""
        script = "return [...document.querySelectorAll(arguments[0])].flatMap((t, i) => t.matches('.marked') ? i : [])"
        return {name: self.ask(script, f"#{name} li") for name in ("from", "to")}

    def shaded(self, name: str) -> list[bool]:
        return self.ask("return [...arguments[0].children].map(t => t.style.background != '')", self.all(f"#{name}")[0])

    def require_no_error(self) -> None:
        assert self.driver.get_log("browser") == []


FOUR, THREE = ["der", "Hund", "läuft", "."], ["the", "dog", "runs"]


@pytest.fixture
def two_examples(browser, tmp_path) -> Opened:
    """A page of a self-attention and a cross-attention of two heads, and of other numbers in a second example."""
    saved(tmp_path / "maps.html", *([a_layer(2, FOUR, FOUR, n), a_layer(2, THREE, FOUR, n + 5)] for n in (0, 1)))
    return Opened(browser, tmp_path / "maps.html")


@pytest.mark.browser
def test_one_steps_through_examples(two_examples):
    page = two_examples
    assert page.text("h1") == page.driver.title == "task, attn"
    assert page.text("#checkpoint") == "best.ckpt"
    seen = [(page.text("#example"), page.text("#numbers"))]
    for act in (page.all("#next")[0].click, lambda: page.press("ARROW_LEFT"), lambda: page.press("ARROW_RIGHT")):
        act()
        seen.append((page.text("#example"), page.text("#numbers")))
    assert seen == [seen[0], seen[1], seen[0], seen[1]]
    assert [text for text, _ in seen[:2]] == ["example 4 (1 of 2)", "example 5 (2 of 2)"]
    assert seen[0][1] != seen[1][1]
    assert not page.all("#next")[0].is_enabled()
    page.require_no_error()


@pytest.mark.browser
def test_a_click_enlarges_a_head_of_which_a_cell_tells_its_weight_and_marks_both_tokens(two_examples):
    page = two_examples
    assert len(page.all("#heads canvas")) == 4
    page.all("#heads button")[3].click()
    assert page.text("#name") == "encoder.0.attention, head 2"
    assert (page.texts("#from li"), page.texts("#to li")) == (THREE, FOUR)
    pressed = [button.get_attribute("aria-pressed") for button in page.all("#heads button")]
    assert pressed == ["false", "false", "false", "true"]
    size = page.ask("const c = document.querySelector('#map canvas'); return [c.height, c.width]")
    assert size == [3, 4]
    page.all("#heads button")[2].click()
    weight = a_layer(2, THREE, FOUR, 5).weights[0, 1, 2]
    page.point("#map", 0.5, 0.6)
    assert page.text("#readout") == f"{weight:.3f}from dog (row 2) to läuft (column 3)"
    assert page.marked() == {"from": [1], "to": [2]}
    assert all(page.shaded("from") + page.shaded("to"))
    page.point("#from", 0.1, 0.5)
    assert page.text("#readout") == "What the (row 1) looks at"
    assert page.marked() == {"from": [0], "to": []}
    assert all(page.shaded("to"))
    assert not any(page.shaded("from"))
    page.point("#to", 0.8, 0.9)
    assert page.text("#readout") == "What looks at . (column 4)"
    assert not any(page.shaded("to"))
    page.point("h1", 0.5, 0.1)
    assert page.marked() == {"from": [], "to": []}
    for key in ("ARROW_DOWN", "ARROW_DOWN", "ARROW_RIGHT"):
        page.press(key, "#map")
    assert page.marked() == {"from": [1], "to": [1]}
    assert page.text("#example") == "example 4 (1 of 2)"
    page.require_no_error()


@pytest.mark.browser
def test_a_patch_is_framed_and_weights_lie_over_the_picture(browser, tmp_path):
    tokens = ["class", *map(str, range(1, 7))]
    layer = a_layer(1, tokens, tokens)
    layer = layer._replace(overlay=(torch.zeros(20, 30, 3, dtype=torch.uint8), torch.zeros(1, 2, 3)))
    saved(tmp_path / "maps.html", [layer])
    page = Opened(browser, tmp_path / "maps.html")
    assert page.text("#picture > p") == "Weights from class to the patches"
    assert page.ask("return document.querySelector('#over img').naturalWidth") == 30
    page.point("#over", 0.75, 0.5)  # the fifth patch
    assert page.text("#picture > p") == "Weights from 5 to the patches"
    assert page.marked() == {"from": [5], "to": []}
    frames = page.ask("return [...document.querySelectorAll('#over .frame')].map(f => [f.style.display, f.style.left])")
    assert [display for display, _ in frames] == ["block", "none"]
    assert frames[0][1].startswith("33.3")
    alpha = "const c = document.querySelector('#over canvas');"
    alpha += "return [...c.getContext('2d').getImageData(0, 0, 3, 2).data].filter((_, i) => i % 4 == 3)"
    weights = layer.weights[0, 5, 1:]
    np.testing.assert_allclose(page.ask(alpha), 200 * weights / weights.max(), atol=1.5)
    page.require_no_error()


@pytest.mark.browser
def test_hostile_tokens_are_text(browser, tmp_path):
    saved(tmp_path / "maps.html", [a_layer(1, HOSTILE, HOSTILE)._replace(name="<b>bold</b>")])
    page = Opened(browser, tmp_path / "maps.html")
    assert page.texts("#from li") == [token.replace("\ud800", "\ufffd") for token in HOSTILE]
    page.point("#map", 0.02, 0.02)
    assert HOSTILE[0] in page.text("#readout")
    assert not page.all("#heads b, li *, #readout script, body > img")
    page.require_no_error()  # an alert would have been one


@pytest.mark.browser
@pytest.mark.parametrize("tokens", [HOSTILE, [f"word{n}" for n in range(200)], ["1"]], ids=("hostile", "many", "one"))
def test_a_page_fits_a_phone(browser, tmp_path, tokens):
    saved(tmp_path / "maps.html", [a_layer(12, tokens, tokens)] * 2)
    page = Opened(browser, tmp_path / "maps.html", width=390)
    assert page.ask("return document.documentElement.scrollWidth") <= 390
    page.point("#map", 0.999, 0.999)
    assert page.marked() == {"from": [len(tokens) - 1], "to": [len(tokens) - 1]}
    assert page.ask("return document.documentElement.scrollWidth") <= 390
    page.require_no_error()
