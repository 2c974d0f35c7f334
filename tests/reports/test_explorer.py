"""The explorer of a study shows its runs' numbers and curves, and what users name as text."""

import json
import re
import shlex
from collections import Counter
from math import inf, isnan, nan

import numpy as np
import pandas as pd
import pytest
import yaml

from kvt.cli.lightning_cli import read_words
from kvt.reports import explorer
from kvt.reports.explorer import explorer_page
from kvt.study.grid import read_grid
from kvt.study.outcomes import Outcome, State, read_outcomes, table_of_histories, table_of_results
from kvt.study.records import find_outcomes
from kvt.system.files import GRIDS
from tests.conftest import REPOSITORY
from tests.helpers.drivers import METRICS, RESULT, finish
from tests.reports.test_page import payload, study

RECORD = REPOSITORY / "docs" / "results" / "table2-laptop"
SHARED = {"dim": 16, "depth": 1, "batch_size": 16, "max_epochs": 1, "train_size": 64, "val_size": 16, "test_size": 16}


def grid_of(folder, tasks=("sort", "sub"), seeds=(0,), **axes):
    path = folder / "own.yaml"
    content = {"tasks": [*tasks], "axes": SHARED | {"attn": ["qkv", "kv"]} | axes, "seeds": [*seeds]}
    path.write_text(yaml.safe_dump(content | {"scales": {"all": None}, "tables": [{"metric": "test/acc"}]}))
    return read_grid(path)


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def values_of(data, name):
    """The values of the first column of a name, None where a run has none."""
    column = next(one for one in data["columns"] if one["name"] == name)
    places = column.get("places", [0] * len(data["curves"]))
    return [column["values"][place] if place >= 0 else None for place in places]


def curve_of(data, run, metric):
    place = str([one["name"] for one in data["metrics"]].index(metric))
    for steps, seconds, values in data["curves"][run]:
        if place in values:
            return pd.DataFrame({"step": data["steps"][steps], "seconds": seconds, metric: values[place]})
    return None


@pytest.fixture(scope="module")
def record():
    grid = read_grid("table2", "laptop")
    return grid, find_outcomes(grid.runs, [RECORD])


def test_its_numbers_are_those_of_the_runs_and_of_their_histories(tmp_path):
    grid = read_grid("table2", "workstation")
    outcomes = find_outcomes(grid.runs, [RECORD.with_name("table2-workstation")])
    table_of_results(grid, outcomes).to_csv(tmp_path / "runs.csv", index=False)
    data, runs = data_of(explorer_page(grid, outcomes)), pd.read_csv(tmp_path / "runs.csv")
    for name in ("name", "task", "attention", "seed", "state", "dim", "heads", "commit"):
        assert values_of(data, name) == [*runs[name].replace({np.nan: None})], name
    for name in ("parameters", "seconds", "val/loss", "val/acc", "test/loss", "test/acc"):
        np.testing.assert_allclose(np.array(values_of(data, name), float), runs[name], rtol=5.1e-5)
    histories = dict([*table_of_histories(grid, outcomes).groupby("name")])
    for place, run in enumerate(grid.runs[::10]):
        for metric in ("train/loss", "val/acc"):
            found = curve_of(data, 10 * place, metric)
            if run.name not in histories:
                assert found is None
                continue
            history = histories[run.name].dropna(subset=metric)
            assert len(found) <= explorer.POINTS
            kept = history.set_index("step").loc[found.step]
            np.testing.assert_allclose(found[metric], kept[metric], rtol=5.1e-5)
            np.testing.assert_allclose(found.seconds, kept.seconds, rtol=5.1e-5)
            assert found.step.iloc[-1] == history.step.iloc[-1]


def test_long_curves_are_thinned_and_many_are_thinned_more(tmp_path, monkeypatch):
    grid = grid_of(tmp_path)
    steps = np.arange(1.0, 1001)
    validated = np.where(steps % 100 == 0, 1 / steps, nan)
    history = pd.DataFrame({"step": steps, "seconds": steps / 7, "train/loss": 1 / steps, "val/loss": validated})
    outcomes = {run.name: [Outcome(State.FINISHED, "", RESULT | METRICS, history)] for run in grid.runs}
    data = data_of(explorer_page(grid, outcomes))
    assert 30 < len(curve_of(data, 0, "train/loss")) <= explorer.POINTS
    assert [*curve_of(data, 0, "val/loss").step] == [*range(100, 1001, 100)]
    monkeypatch.setattr(explorer, "ALL_POINTS", 20 * 8)
    fewer = curve_of(data_of(explorer_page(grid, outcomes)), 0, "train/loss")
    assert 10 < len(fewer) <= 20
    assert fewer.step.iloc[-1] == 1000


def test_a_page_loads_nothing_and_holds_names_in_its_json_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    grid, root = study(tmp_path)
    page = explorer_page(grid, read_outcomes(grid.runs, root))
    data, template = data_of(page), explorer.TEMPLATE.read_text()
    assert page.count("<") == template.count("<"), "what is named opens no element"
    assert not re.search(r"(src|href|url\(|import)\s*[=(]|https?:", template)
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in page
    assert data["title"] == payload("title")
    assert set(values_of(data, "task")) == {run.task for run in grid.runs}
    assert payload("processor") in values_of(data, "machine.processor")
    assert f"tagged.Tagged, tag {payload('attention')}" in values_of(data, "attention")
    words = [shlex.split(word)[0] for word in values_of(data, "--model.attn_kwargs") if word]
    assert json.loads(words[0].partition("=")[2]) == {"tag": payload("attention")}


def test_runs_that_are_not_finished_are_shown_too(tmp_path):
    grid = grid_of(tmp_path)
    data = data_of(explorer_page(grid, {}))
    assert values_of(data, "state") == ["to run"] * 4
    assert data["metrics"] == []
    assert data["curves"] == [[]] * 4
    history = pd.DataFrame({"step": [1.0, 2.0], "seconds": [1.0, 2.0], "train/loss": [2.0, nan]})
    diverged = Outcome(State.DIVERGED, "loss is NaN", RESULT | {"train/loss": nan}, history)
    data = data_of(explorer_page(grid, {grid.runs[1].name: [diverged]}))
    assert values_of(data, "message")[1] == "loss is NaN"
    assert [*curve_of(data, 1, "train/loss").step] == [1]


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_numbers_that_are_not_finite_are_texts_and_gaps_in_curves(tmp_path, value):
    grid = grid_of(tmp_path)
    history = pd.DataFrame({"step": [1.0, 2.0], "seconds": [1.0, 2.0], "val/loss": [value, 1.5]})
    run = {"test/acc": value, "notes": {"scores": [value]}}
    data = data_of(explorer_page(grid, {grid.runs[0].name: [Outcome(State.FINISHED, "", RESULT | run, history)]}))
    assert values_of(data, "test/acc") == [json.dumps(value), None, None, None]
    known = curve_of(data, 0, "val/loss")
    assert [*known.step] == ([2] if isnan(value) else [1, 2])
    assert known["val/loss"].iloc[-1] == 1.5
    assert known["val/loss"].notna().sum() == 1


def test_settings_that_are_lists_mappings_or_null_are_texts(tmp_path):
    axes = {
        "attn": ["kv"],
        "attn_kwargs": [None, {"kv_heads": 1}],
        "gradient_clip_val": [None, 0.123456789],
        "heads": 2,
    }
    data = data_of(explorer_page(grid_of(tmp_path, **axes), {}))
    assert set(values_of(data, "gradient_clip_val")) == {"null", 0.123456789}
    assert set(values_of(data, "model.attn_kwargs")) == {"null", '{"kv_heads": 1}'}
    assert set(values_of(data, "attention")) == {"kv", "kv, kv_heads 1"}


def test_a_study_of_one_run(tmp_path):
    grid = grid_of(tmp_path, tasks=["sort"], attn="kv")
    (run,) = grid.runs
    finish(run, tmp_path)
    data = data_of(explorer_page(grid, read_outcomes(grid.runs, tmp_path)))
    assert all("places" not in column for column in data["columns"]), "what all runs have is there once"
    assert values_of(data, "name") == [run.name]
    assert values_of(data, "test/acc") == [METRICS["test/acc"]]
    assert [*curve_of(data, 0, "train/loss").step] == [10, 20]


def configuration(words):
    return read_words(["fit", *words]).config


@pytest.mark.parametrize("name", sorted(path.stem for path in GRIDS.glob("*.yaml")))
def test_a_command_makes_the_run_again(name):
    """The same settings, of a run of every task and attention."""
    runs = read_grid(name, "paper").runs
    chosen = {run.task: run for run in runs} | {run.value("attn"): run for run in runs}
    for run in chosen.values():
        config = configuration(run.config.words)
        assert config.name == run.name
        assert run.config.differences(config) == []


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of a grid's outcomes in a window of a width; at the end it has logged no error."""

    def open_page(grid, outcomes, width=1200):
        (tmp_path / "explorer.html").write_text(explorer_page(grid, outcomes))
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((tmp_path / "explorer.html").as_uri())
        frame(browser)
        return browser

    yield open_page
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []


def frame(browser):
    """Wait until what has changed is drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def element(browser, css):
    return browser.find_element("css selector", css)


def click(browser, css):
    element(browser, css).click()
    frame(browser)


def drag(browser, start, end):
    """Press the mouse at a place of the plot, release it at another; both as offsets from its top left corner."""
    actions = pytest.importorskip("selenium.webdriver").ActionChains(browser)
    canvas = element(browser, "#points")
    browser.execute_script("arguments[0].scrollIntoView()", canvas)
    middle = np.array([canvas.size["width"] // 2, canvas.size["height"] // 2])
    for place, then in ((start, actions.click_and_hold), (end, actions.release)):
        actions.move_to_element_with_offset(canvas, *map(int, np.round(place - middle)))
        then()
    actions.perform()
    frame(browser)


def place_of(browser, run):
    return np.array(browser.execute_script("return [px[arguments[0]], py[arguments[0]]]", run))


def picture(browser, css):
    """What is drawn on a canvas."""
    return browser.execute_script("return arguments[0].toDataURL()", element(browser, css))


def shown(page):
    """Return how many runs a page says that it shows, of how many."""
    found = re.match(r"(\d+) of (\d+) runs shown", element(page, "#status").text)
    return int(found[1]), int(found[2])


@pytest.mark.browser
def test_filters_count_what_they_would_show(show, record):
    runs = record[0].runs
    sorts = [run for run in runs if run.task == "sort"]
    counts = list(Counter(run.attention for run in sorts).values())
    page, sort = show(*record), "#choices fieldset:nth-child(1) label:nth-child(2)"
    assert shown(page) == (len(runs), len(runs))
    assert element(page, sort).text.split() == ["sort", str(len(sorts))]
    click(page, f"{sort} input")
    assert shown(page) == (len(sorts), len(runs))
    attentions = page.find_elements("css selector", "#attentions .count")
    assert [int(count.text) for count in attentions] == counts
    click(page, "#attentions label:nth-child(3) input")
    assert shown(page) == (counts[2], len(runs))
    assert [int(count.text) for count in attentions] == counts, "of the other filters"
    assert element(page, sort).text.split() == ["sort", str(counts[2])]
    click(page, "#reset")
    assert shown(page) == (len(runs), len(runs))


@pytest.mark.browser
def test_a_click_shows_the_card_of_a_run_with_its_command(show, record):
    page = show(grid := record[0], record[1])
    heading = element(page, "#card h2")
    assert heading.text == "A run"
    # the one with the least accuracy has no neighbour
    run = page.execute_script("return indices(shown).sort((a, b) => py[b] - py[a])[0]")
    drag(page, place_of(page, run), place_of(page, run))
    made, text = grid.runs[run], element(page, "#card").text
    assert made.name in text
    assert made.task in element(page, "#card h2").text
    copied = "getSelection().selectAllChildren(arguments[0]); return getSelection().toString()"
    kvt, fit, *words = shlex.split(page.execute_script(copied, element(page, "#card pre")))
    assert [kvt, fit] == ["kvt", "fit"]
    assert configuration(words).name == made.name
    for name in ("dim", "heads", "length"):
        assert f"{name}\n{made.value(name)}" in text
    assert element(page, "#status").text.endswith(", 1 selected")


@pytest.mark.browser
def test_a_brush_selects_runs_and_draws_their_curves(show, record):
    page = show(*record)
    runs = len(record[0].runs)
    assert re.fullmatch(rf"\d+ curves of {runs} shown runs, of which 300 are drawn", element(page, "#drawn").text)
    of_all = picture(page, "#curves")
    left, right, bottom, top = page.execute_script("return [box.left, box.right, box.bottom, box.top]")
    drag(page, np.array([left + 5, bottom - 5]), np.array([right - 5, (top + bottom) / 2]))
    inside = page.execute_script("return indices(shown).filter(run => py[run] >= (box.top + box.bottom) / 2).length")
    assert 1 < inside < 100
    assert shown(page) == (runs, runs)
    assert element(page, "#status").text.endswith(f", {inside} selected")
    assert re.match(rf"\d+ curves of {inside} selected runs$", element(page, "#drawn").text)
    of_selected = picture(page, "#curves")
    assert of_selected != of_all
    click(page, "#clear")
    assert "selected" not in element(page, "#status").text
    assert picture(page, "#curves") == of_all


@pytest.mark.browser
def test_keys_go_from_run_to_run(show, record):
    page, keys = show(*record), pytest.importorskip("selenium.webdriver").Keys
    canvas = element(page, "#points")
    canvas.send_keys(keys.ARROW_RIGHT)
    frame(page)
    assert element(page, "#tip").text.startswith("reverse · QKV")
    canvas.send_keys(keys.ENTER)
    frame(page)
    assert element(page, "#card h2").text == "reverse · QKV"
    assert element(page, "#status").text.endswith(", 1 selected")
    canvas.send_keys(keys.ESCAPE)
    frame(page)
    assert "selected" not in element(page, "#status").text


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1200])
def test_hostile_names_are_text(show, width, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    grid, root = study(tmp_path)
    page = show(grid, read_outcomes(grid.runs, root), width)
    page.execute_script("choose(1); document.querySelectorAll('details').forEach(one => { one.open = true; })")
    frame(page)
    assert page.title == " ".join(payload("title").split()), "of which it makes one line"
    assert element(page, "h1").get_property("textContent") == payload("title")
    text = element(page, "#card").get_property("textContent")
    assert payload("processor") in text
    assert payload("package") in text
    assert page.find_elements("css selector", "img, iframe, script:not(#data) ~ script ~ script") == []
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
@pytest.mark.parametrize("name", ["table2", "figure7", "directions"])
def test_a_narrow_page_does_not_scroll_sideways(show, name):
    grid = read_grid(name, "laptop")
    page = show(grid, find_outcomes(grid.runs, [RECORD.parent / grid.report]), width=390)
    page.execute_script("choose(0); document.querySelectorAll('details').forEach(one => { one.open = true; })")
    frame(page)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390


@pytest.mark.browser
def test_studies_without_results_or_of_one_run_are_shown(show, tmp_path):
    page = show(grid_of(tmp_path), {})
    assert element(page, "#status").text == "4 of 4 runs shown"
    assert element(page, "#drawn").text == "0 curves of 4 shown runs"
    grid = grid_of(tmp_path, tasks=["sort"], attn="kv")
    finish(grid.runs[0], tmp_path)
    page = show(grid, read_outcomes(grid.runs, tmp_path))
    assert element(page, "#drawn").text == "1 curve of 1 shown run"


@pytest.mark.browser
def test_a_log_axis_has_zero_at_its_end(show, tmp_path):
    """Runs whose loss is 0 stay on a log axis, at the end of it, and so do their curves."""
    grid = grid_of(tmp_path, tasks=("sort",), seeds=range(3))
    outcomes = {}
    for run, loss in zip(grid.runs, (0.0, 0.0, 1e-3, 1e-2, 0.1, 1.0), strict=True):
        history = pd.DataFrame({"step": [1, 2], "seconds": [1, 2], "val/loss": [1.0, loss]})
        outcomes[run.name] = [Outcome(State.FINISHED, result=RESULT | METRICS | {"test/acc": loss}, history=history)]
    page = show(grid, outcomes)
    linear = picture(page, "#curves")
    click(page, "#y-log")
    places = [place_of(page, run)[1] for run in range(6)]
    bottom = page.execute_script("return box.bottom")
    assert places[0] == places[1] == bottom
    assert np.diff(places[2:]) == pytest.approx(np.full(3, places[3] - places[2]))
    assert places[2] < bottom - 5
    assert element(page, "#status").text == "6 of 6 runs shown"
    click(page, "#metric-log")
    assert picture(page, "#curves") != linear
