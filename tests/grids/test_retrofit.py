"""Trained models with another attention: what the script measures, trains on, and sets beside each other."""

from pathlib import Path

import pandas as pd
import pytest
import retrofit
import yaml

from kvt.study import runner
from kvt.study.grid import read_grid
from tests.helpers.in_line import InLine

REPORT = Path("runs/reports/retrofit-smoke")
KV = "kv, attend_self False"


def test_each_attention_can_come_from_qkv_in_some_ways():
    found = {run.attention: retrofit.hows(run) for run in read_grid("retrofit", "laptop").runs}
    either = ["keep_k", "keep_v", "mean", "least_squares"]
    of_query = ["keep_k", "mean", "least_squares"]  # nothing shares the projection of the value
    assert found == {"qkv": ["mean"], "q-kv": either, "k": either} | dict.fromkeys(("kv", KV, "kv+phase"), of_query)


def test_all_are_made_once_and_what_a_conversion_costs_is_measured_before_training(in_tmp_dir, monkeypatch, capsys):
    engine = InLine()
    monkeypatch.setattr(runner, "LocalWorkers", lambda *_: engine)
    monkeypatch.setattr(retrofit, "PARTS", (20,))
    retrofit.main("smoke", "runs", "1")
    made = 2 + (1 + 3) + 2  # of the grid, converted, and one of each attention with a teacher
    assert sum(engine.asked.values()) == made
    assert {*engine.asked.values()} == {1}
    table = pd.read_csv(REPORT / "losses.csv", keep_default_na=False)
    loss = table.set_index(["attention", "how", "per cent"]).loss
    assert len(loss) == made + (1 + 3)
    assert loss["qkv", "mean", 0] == pytest.approx(loss["qkv", "", 100], abs=1e-6)  # the same model
    gains = loss[KV, :, 0] - loss[KV, :, 20]
    assert (gains.dropna() > 0).all()
    assert gains[gains.isna()].index.tolist() == ["least_squares, taught"]

    configs = [yaml.safe_load(path.read_text()) for path in Path("runs").rglob("config.yaml")]
    begun = [config for config in configs if config["ckpt_path"]]
    assert [config["trainer"]["max_steps"] for config in begun] == [20] * 6
    taught = {config["model"]["init_args"]["attn"]: config["teacher"] for config in begun if config["teacher"]}
    assert taught.keys() == {"qkv", "kv"}
    assert len({*taught.values()}) == 1  # both learn from the same qkv
    assert loss[KV, "least_squares, taught", 20] != loss[KV, "least_squares", 20]
    page = (REPORT / "losses.md").read_text()
    assert "|  |  | right after | 20 % | from the start |" in page
    keep = f"{loss[KV, 'keep_k', 0] - loss['qkv', '', 100]:+.3f}"
    assert f"| KV without self | keep_k | {keep} |" in page

    retrofit.main("smoke", "runs", "1")
    assert {*engine.asked.values()} == {1}
    assert (REPORT / "losses.md").read_text() == page
