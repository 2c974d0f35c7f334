"""What users change of a task's model and training: a flag of every task that has the part."""

import json
import re
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kvt
from kvt.attention import ATTENTION
from kvt.models.blocks import ACTIVATIONS, NORMS, FeedForward, Residual
from kvt.system import UserError
from kvt.tasks.schedules import NEEDS, NO_WARMUP, SCHEDULES
from tests.conftest import REPOSITORY
from tests.helpers.small_tasks import TASKS, small_batch, small_task
from tests.run.test_overfit import small

SMOOTHED = {"AnomalyTask", "ImageTask", "ListTask", "RecallTask", "TranslationTask"}
CASES = [(name, schedule) for name in TASKS for schedule in SCHEDULES if schedule not in NEEDS]


def those(task, kind):
    return [module for module in task.modules() if isinstance(module, kind)]


@pytest.mark.parametrize(("norm", "activation"), zip(cycle(NORMS), ACTIVATIONS, strict=False))
@pytest.mark.parametrize("name", TASKS)
def test_all_blocks_have_the_norm_activation_width_and_dropout_that_are_asked_for(name, norm, activation):
    for expansion in (1.3, 0):
        task = small_task(name, norm=norm, activation=activation, expansion=expansion, dropout=0.3)
        assert {type(residual) for residual in those(task, Residual)} == {NORMS[norm]}
        networks = those(task, FeedForward)
        kinds = {(type(network[1]), network[0].out_features) for network in networks}
        assert kinds == ({(ACTIVATIONS[activation], 10)} if expansion else set())  # 1.3 · 8
        assert 0.3 in {module.p for module in those(task, nn.Dropout)}
        task.compute_metrics(small_batch(name))["loss"].backward()


def test_the_guide_has_the_defaults_of_every_task():
    lines = (REPOSITORY / "docs/guides/model.md").read_text().splitlines()
    rows = (re.split(r"`? \| `?", line.strip("| `")) for line in lines if line.startswith(("| flag", "| `--")))
    (_, *names), *rows = rows
    assert {*names} == {*TASKS}
    tasks = [small_task(name).hparams for name in names]
    for flag, *told in rows:
        defaults = [str(task.get(flag.removeprefix("--"), "–")) for task in tasks]
        assert [text.split()[0] for text in told] == defaults, flag  # of "0 in mqar, else 4" the 0


def rates(task, steps: int) -> list[float]:
    """Return the rate with which each step of a run of so many is made."""
    task.trainer = SimpleNamespace(estimated_stepping_batches=steps)
    made = task.configure_optimizers()
    if not isinstance(made, dict):
        return [made.param_groups[0]["lr"]] * steps
    seen = []
    for _ in range(steps):
        seen.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    return seen


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_every_task_takes_every_schedule_that_rises_to_its_rate(name, schedule):
    warmup = 0 if schedule in NO_WARMUP else 4
    seen = rates(small_task(name, schedule=schedule, warmup=warmup, lr=0.01), 20)
    expected = 0.01 * (0.93 if schedule == "cosine" else 1)  # falls while it rises
    assert max(seen) == pytest.approx(expected, rel=0.05)
    assert seen[0] < seen[2] < max(seen)
    assert seen[-1] < max(seen) / 2 or schedule == "constant"


def test_schedules_are_their_formulas():
    given = {"lr": 0.01, "warmup": 4}
    expected = {
        "constant": [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01],
        "cosine_to_tenth": [0, 0.0025, 0.005, 0.0075, 0.01, 0.0055],
        "inverse_sqrt": [0.0025, 0.005, 0.0075, 0.01, 0.01 * (4 / 5) ** 0.5, 0.01 * (4 / 6) ** 0.5],
    }
    for schedule, wanted in expected.items():
        assert rates(small_task("ListTask", schedule=schedule, **given), 6) == pytest.approx(wanted)
    for schedule in ("cosine", "cosine_to_tenth", "constant"):
        assert rates(small_task("ListTask", schedule=schedule, lr=0.01, warmup=0), 6)[0] == 0.01


@pytest.mark.parametrize("name", sorted(SMOOTHED - {"TranslationTask"}))
def test_smoothing_is_of_the_training_loss_alone(name):
    batch, losses = small_batch(name), {}
    for smoothing in (0.0, 0.2):
        torch.manual_seed(0)
        task = small_task(name, smoothing=smoothing, dropout=0.0)
        losses[smoothing] = [task.train(mode).compute_metrics(batch)["loss"].item() for mode in (True, False)]
    asked = batch[1] >= 0 if name == "RecallTask" else slice(None)
    logits = task(*task.inputs(batch))[asked]
    everywhere = -logits.log_softmax(-1).mean().item()
    true, false = losses[0.0]
    assert losses[0.2] == pytest.approx([0.8 * true + 0.2 * everywhere, false], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "attn", "match", "settings"),
    [
        *((name, "kv", "qkv", {}) for name in TASKS),
        *(("LanguageModelTask", attn, "qkv", {}) for attn in ATTENTION),
        ("LanguageModelTask", "q-kv", "qkv", {"share_layers": 2}),  # matched with layers that do not share
        ("LanguageModelTask", "qkv", "k", {"expansion": 1}),  # no width is left
        ("ListTask", "qkv", "qkv", {"attn_kwargs": {"kv_heads": 1}}),
    ],
)
def test_a_matched_model_has_as_many_parameters_as_that_with_another_attention(name, attn, match, settings):
    sizes = {"dim": 128, "depth": 4, "heads": 4, "expansion": 3} | settings
    whole = {"attn": match, "attn_kwargs": None, **({"share_layers": 1} if "share_layers" in settings else {})}
    task, reference = (small_task(name, **sizes | given) for given in ({"attn": attn, "match": match}, whole))
    counts = [task.num_parameters, reference.num_parameters]
    assert counts[0] == pytest.approx(counts[1], rel=0.005)
    numbers = f"{counts[0]:,} parameters, {counts[1]:,} with {match}"
    assert task.metric_notes["matched"] == f"expansion {task.expansion:.6g}: {numbers}"
    widths = {network[0].out_features for network in those(task, FeedForward)}
    assert widths == ({round(task.expansion * 128)} if task.expansion else set())
    task.compute_metrics(small_batch(name))["loss"].backward()


def test_a_search_for_the_matching_width_draws_no_random_number():
    torch.manual_seed(0)
    matched = small_task("ListTask", attn="kv", match="qkv")
    torch.manual_seed(0)
    plain = small_task("ListTask", attn="kv", expansion=matched.expansion)
    assert all(map(torch.equal, matched.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"norm": "other"}, "unknown norm 'other'"),
        ({"activation": "other"}, "unknown activation 'other'"),
        ({"schedule": "noam"}, "unknown schedule 'noam'"),
        ({"expansion": -1}, "expansion=-1 must be 0 or more"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"warmup": 0, "schedule": "inverse_sqrt"}, "warmup=0"),
        ({"warmup": 5, "schedule": "one_cycle"}, "schedule=one_cycle has no warm-up"),
        ({"match": "other"}, "unknown match 'other'"),
        ({"match": "qkv", "expansion": 0}, "match=qkv: the model has no feed-forward network to widen"),
        ({"match": "k", "attn": "qkv+pos", "attn_kwargs": {"pos": "learned"}, "expansion": 0.1, "dim": 64}, "no width"),
    ],
)
def test_a_setting_that_a_task_does_not_have_is_named(settings, told):
    with pytest.raises(UserError, match=told):
        small_task("ListTask", **settings)


def test_a_matched_run_is_loaded_and_named_as_it_was_asked_for(in_tmp_dir):
    config = small("reverse", max_epochs=1, dim=64, attn="kv", match="qkv")
    assert config.name != config.changed(match=None).name
    result = kvt.train(config, "run")
    task = kvt.load("run/checkpoints/best.ckpt")
    assert task.num_parameters == result.metrics["parameters"]
    assert json.loads(Path("run/result.json").read_text())["notes"]["matched"] == task.metric_notes["matched"]
