"""`benchmarks/gpu.py` goes on where it stopped, ends in time, and lets nothing that fails stop the rest."""

import json
import os
import signal
import subprocess
from functools import partial
from time import sleep
from types import SimpleNamespace

import gpu
import gpu_checks
import gpu_runs
import pytest
import torch
import torch.nn.functional as F
from gpu_report import FAILED, SO_FAR, WRONG, Case, Part, Report, Setting, is_done
from hypothesis import given
from hypothesis import strategies as st

from kvt.attention import ATTENTION, kernels
from tests.helpers.drivers import alive

HEAD = ("name", "number")


def note(setting, name):
    with (setting.out / "calls").open("a") as file:
        file.write(f"{name} ")
    if name == "broken" and not (setting.out / "mended").exists():
        raise ValueError("not yet | mended\nin two lines")
    return [str(len(name))]


def noted(*names, setting):
    for name in names:
        yield Case((name,), partial(note, setting, name))


def good(setting):
    return noted("good", setting=setting)


def with_a_broken_row(setting):
    return noted("first", "broken", "last", setting=setting)


def broken(setting):
    yield from noted("before", setting=setting)
    raise RuntimeError("no such GPU")


def dying(setting):
    yield from noted("before", setting=setting)
    os.kill(os.getpid(), signal.SIGSEGV)


def endless(setting):
    yield from noted("before", setting=setting)
    child = subprocess.Popen(["sleep", "1000"])
    (setting.out / "child").write_text(str(child.pid))
    yield Case(("after",), partial(sleep, 1000))


def parts(*cases):
    return {each.__name__: Part(f"About {each.__name__}.", HEAD, each, share=1) for each in cases}


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs `gpu.main` with parts; returns its exit code and the report."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which it changes

    def run(asked, *words, minutes=2.0):
        code = gpu.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", str(minutes), *words], asked)
        return code, Report(tmp_path / "report.md", "", asked)

    return run


def calls(folder):
    found = (folder / "calls").read_text().split()
    (folder / "calls").unlink()
    return found


def test_the_same_command_does_what_is_missing_and_nothing_else(call, tmp_path):
    asked = parts(with_a_broken_row, good)
    code, report = call(asked)
    assert code == 1
    assert calls(tmp_path) == ["first", "broken", "last", "good"]
    failed = f"{FAILED}ValueError: not yet / mended"
    assert report.rows["with_a_broken_row"] == [("first", "5"), ("broken", failed), ("last", "4")]
    assert not report.is_complete("with_a_broken_row")
    assert report.is_complete("good")
    assert "not yet | mended\nin two lines" in (tmp_path / "log.txt").read_text()
    (tmp_path / "mended").touch()
    code, report = call(asked)
    assert code == 0
    assert calls(tmp_path) == ["broken"]
    assert sorted(report.rows["with_a_broken_row"]) == [("broken", "6"), ("first", "5"), ("last", "4")]
    assert call(asked)[0] == 0
    assert not (tmp_path / "calls").exists()


def test_a_part_that_fails_or_dies_does_not_stop_the_others(call):
    code, report = call(parts(broken, dying, good))
    assert code == 1
    assert report.rows == {"broken": [("before", "6")], "dying": [("before", "6")], "good": [("good", "4")]}
    assert "RuntimeError: no such GPU" in report.status["broken"]
    assert "exit code -11" in report.status["dying"]
    assert report.is_complete("good")


@pytest.mark.slow
def test_a_part_ends_with_its_share_of_the_time_and_with_all_that_it_has_started(call, tmp_path):
    code, report = call(parts(endless, good))
    assert code == 1
    assert report.rows == {"endless": [("before", "6")], "good": [("good", "4")]}
    assert "time was up" in report.status["endless"]
    assert not alive(int((tmp_path / "child").read_text()))


def test_without_time_nothing_is_measured(call, tmp_path):
    code, report = call(parts(good), minutes=0)
    assert (code, report.rows) == (1, {"good": []})
    assert "time was up" in report.status["good"]


def test_numbers_of_two_machines_are_not_mixed(tmp_path, capsys):
    (tmp_path / "report.md").write_text("# kvt on another machine\n")
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cpu", "--out", str(tmp_path)], parts(good))
    assert "kvt on another machine" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    assert "needs a GPU: choose --device cpu" in capsys.readouterr().err


cells = st.text(st.characters(codec="ascii", exclude_characters="|", exclude_categories=["C"]), max_size=9).map(
    lambda text: " ".join(text.split())
)
tables = st.dictionaries(
    st.sampled_from(["one", "two", "three"]),
    st.lists(st.tuples(cells, cells), unique_by=lambda row: row[0], max_size=3),
)


@given(tables)
def test_a_report_that_is_read_is_the_one_that_was_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("report") / "report.md"
    every = {name: Part("About it.", HEAD, good, share=1) for name in ("one", "two", "three")}
    written = Report(path, "# kvt on something", every)
    for name, of_part in rows.items():
        for first, second in of_part:
            written.add(name, (first,), (second,))
        written.end(name, "")
    written.write()
    read = Report(path, "", every)
    assert (read.rows, read.status) == ({name: rows[name] for name in rows}, written.status)
    assert all(read.is_complete(name) == all(map(is_done, rows[name])) for name in rows)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", gpu.PARTS)
def test_rows_have_names_of_their_own_and_fit_their_table(name, device, tmp_path):
    if (name, device) == ("decoding", "cuda"):
        pytest.skip("makes its models on the GPU")
    part = gpu.PARTS[name]
    keys = [case.key for case in part.cases(Setting(device, tmp_path, 0.0, {}))]
    assert len({*keys}) == len(keys) > 0
    assert {len(key) for key in keys} <= {len(keys[0])}
    assert len(keys[0]) < len(part.head)
    if name in ("accuracy", "attention kernels"):
        assert {key[0] for key in keys} == {*ATTENTION}


def spoilt(q, k, v, mask=None, **settings):
    """Attention whose output is right, and whose gradient of the values is doubled where there is a mask."""
    return F.scaled_dot_product_attention(q, k, v if mask is None else 2 * v - v.detach(), mask, **settings)


def test_a_kernel_with_wrong_gradients_is_called_wrong_where_it_is(monkeypatch):
    row = partial(gpu_checks.errors, "qkv", "sinusoid", torch.device("cpu"), "float32", gpu_checks.KVTS, (5, 6))
    monkeypatch.setattr(kernels, "SMALL_MAP", {False: 0, True: 0})  # even short texts take a fused kernel
    assert row()[-1] == "right"
    monkeypatch.setattr(kernels, "F", SimpleNamespace(scaled_dot_product_attention=spoilt, pad=F.pad))
    output, of_input, of_weights, verdict = row()
    assert float(output) < 1e-5
    assert float(of_input) > 0.1 < float(of_weights)
    kinds = "padded", "causal+padded", "arbitrary"
    assert verdict == WRONG + ", ".join(f"{kind} {length}" for length in (5, 6) for kind in kinds)


def test_nan_is_wrong(monkeypatch):
    nothing = SimpleNamespace(
        scaled_dot_product_attention=lambda q, k, v, *_, **given: q * ((k + v).sum() * float("nan"))
    )
    monkeypatch.setattr(kernels, "SMALL_MAP", {False: 0, True: 0})
    monkeypatch.setattr(kernels, "F", nothing)
    row = gpu_checks.errors("qkv", "sinusoid", torch.device("cpu"), "float32", gpu_checks.KVTS, (5,))
    assert row[0] == "nan"
    assert row[-1].startswith(WRONG)


def wrong(setting):
    yield from noted("before", setting=setting)
    yield Case(("kernel",), lambda: [f"{WRONG}causal 64"])


def test_a_wrong_number_is_no_success(call):
    code, report = call(parts(wrong, good))
    assert code == 1
    assert not report.is_complete("wrong")
    assert report.is_complete("good")


def test_runs_that_differ_are_told_from_equal_ones(tmp_path):
    for name, loss in (("one", 1), ("same", 1), ("other", 2)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "result.json").write_text(json.dumps({"test/loss": loss, "seconds": id(name)}))
        (tmp_path / name / "history.csv").write_text("step,seconds\n")
        states = {"optimizer_states": [{"state": {}}], "state_dict": {"w": torch.ones(2)}, "epoch": 1, "global_step": 2}
        states |= {"hyper_parameters": {}}
        for file in ("best", "last"):
            torch.save(states, tmp_path / name / "checkpoints" / f"{file}.ckpt")
    assert gpu_checks._same(tmp_path / "same", tmp_path / "one") == "yes"
    assert gpu_checks._same(tmp_path / "other", tmp_path / "one") == "no"
    torch.save(states | {"state_dict": {"w": torch.zeros(2)}}, tmp_path / "same" / "checkpoints" / "last.ckpt")
    assert gpu_checks._same(tmp_path / "same", tmp_path / "one") == "no"


def test_a_study_that_is_interrupted_is_to_go_on_with_the_best_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_runs, "RUNS", tmp_path / "runs")
    rows = [("1", "36.0", "100"), ("4", "20.0", "720"), ("16", "failed: x")]
    commands = []

    def endless_study(command, cwd):
        commands.append(" ".join(command))
        return subprocess.Popen(["sleep", "1000"])

    stand_in = SimpleNamespace(Popen=endless_study, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu_runs, "subprocess", stand_in)
    found = gpu_runs.recorded(Setting("cpu", tmp_path, 0.0, {"processes": rows}))
    assert found == [f"{SO_FAR}0 of 60 runs", "4"]
    assert "--workers 4 " in commands[0]


@pytest.mark.slow
def test_a_rehearsal_on_a_cpu_is_right_and_complete(call, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_runs, "RUNS", tmp_path / "runs")
    names = [name for name in gpu.PARTS if name not in ("tests", "table 2")]
    code, report = call(gpu.PARTS, "--parts", *names, minutes=30.0)
    assert code == 0, (tmp_path / "report.md").read_text()
    assert {row[-1] for row in report.rows["accuracy"]} == {"right"}
    assert {row[-2:] for row in report.rows["exact resume"]} == {("yes", "yes")}
    assert "nan" not in (tmp_path / "report.md").read_text()
