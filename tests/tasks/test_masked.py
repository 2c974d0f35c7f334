"""Language models of hidden tokens."""

import csv

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt import load
from kvt.data.tokens import IGNORE
from kvt.system import UserError
from kvt.tasks import LanguageModelTask
from kvt.tasks.language import MaskedBatches, TokenBatches
from tests.conftest import SMALL

MASK = 50
MASKED = [*SMALL["language_model"], "--objective", "masked"]


def batches(stops: list[int], *, size: int = 8, seed: int = 0, length: int = 100, filler: int = IGNORE, **own):
    """Rows of a random stream, a row at each hundredth token that ends at a stop; with and without hidden tokens."""
    generator = torch.Generator().manual_seed(5)
    stream = torch.randint(MASK - 1, (100 * len(stops),), generator=generator)
    starts = torch.arange(len(stops)) * 100
    rows = starts, starts + torch.tensor(stops), stream
    layout = {"length": length, "fill": MASK - 1, "filler": filler, "batch_size": size, "seed": seed}
    return MaskedBatches(*rows, mask=MASK, **layout, **own), TokenBatches(*rows, **layout)


def together(loader) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


@settings(max_examples=30, deadline=None)
@given(
    stops=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    length=st.integers(1, 99),
    trains=st.booleans(),
    filler=st.sampled_from([IGNORE, MASK - 1]),
)
def test_a_seventh_of_what_is_served_is_hidden_and_nothing_else_changes(stops, length, trains, filler):
    masked, plain = batches(stops, size=len(stops), length=length, filler=filler, reseed=trains)
    (inputs, targets, real), (tokens, *_) = next(iter(masked)), next(iter(plain))
    hidden = targets != IGNORE
    sizes = torch.tensor(stops).clamp(max=length)
    served = sizes if filler == IGNORE else torch.full_like(sizes, length)
    assert hidden.sum(1).tolist() == (0.15 * served).round().clamp(min=1).int().tolist()
    assert torch.equal(targets[hidden], tokens[hidden])
    assert torch.equal(inputs[~hidden], tokens[~hidden])
    assert torch.equal(real, hidden & (torch.arange(length) < sizes.unsqueeze(1)))


def test_of_the_hidden_tokens_eight_in_ten_are_the_mask_one_is_another_and_one_stays():
    inputs, targets, _ = together(batches([100] * 2000, size=100)[0])
    hidden = targets != IGNORE
    is_mask, stays = inputs[hidden] == MASK, inputs[hidden] == targets[hidden]
    shares = torch.stack([is_mask, stays, ~is_mask & ~stays]).float().mean(1)
    assert shares.tolist() == pytest.approx([0.8, 0.1, 0.1], abs=5 * (0.8 * 0.2 / 30_000) ** 0.5)
    others = inputs[hidden][~is_mask & ~stays]
    assert set(others.tolist()) == set(range(MASK))
    assert hidden.float().mean(0).sub(0.15).abs().max() < 5 * (0.15 * 0.85 / 2000) ** 0.5  # at every place as often


def test_validation_hides_by_seed_and_row_alone_and_training_anew_in_each_epoch():
    first = together(batches([100] * 10, size=3)[0])
    again = together(batches([100] * 10, size=10)[0])
    other = together(batches([100] * 10, size=10, seed=1)[0])
    for part, same, different in zip(first, again, other, strict=True):
        assert torch.equal(part, same)
        assert not torch.equal(part, different)
    epochs = []
    for epoch in (0, 1, 1):
        loader, _ = batches([100] * 10, size=10, reseed=True)
        loader.set_epoch(epoch)
        epochs.append(next(iter(loader))[1])
    assert torch.equal(epochs[1], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


def test_a_hidden_token_is_predicted_from_both_sides():
    torch.manual_seed(0)
    spec = {"tokenizer": "bytes", "length": 16, "objective": "masked"}
    task = LanguageModelTask(spec, attn="kv", dim=16, depth=1, heads=2, dropout=0.0, positions="rotary").eval()
    inputs, place = torch.randint(257, (1, 16)), 8
    inputs[0, place] = 257  # the mask, beyond the 256 bytes and the end
    with torch.no_grad():
        for changed in (place - 1, place + 1):
            others = inputs.clone()
            others[0, changed] = (inputs[0, changed] + 1) % 257
            assert not torch.allclose(task(others)[0, place], task(inputs)[0, place])
        targets = torch.full_like(inputs, IGNORE)
        targets[0, place] = 65
        computed = task.compute_metrics((inputs, targets, targets != IGNORE))
        torch.testing.assert_close(computed["loss"], F.cross_entropy(task(inputs)[:, place], torch.tensor([65])))


def test_a_run_is_measured_and_predicts_as_any_other(experiment, kvt):
    result = experiment("language_model", *MASKED)
    run = result["path"].parent
    read = result["tokens_per_second"] * result["seconds"]
    settings = result["config"]["data"]["init_args"]
    assert read == pytest.approx(6 * settings["batch_size"] * settings["length"])  # steps, windows, tokens
    kvt("predict", "--ckpt_path", str(run))
    rows = list(csv.DictReader(next(run.rglob("predictions*.csv")).open()))
    assert any("<mask>" in row["input"] for row in rows)
    task = load(run)
    lengths = {len(task.vocabulary.encode(row["target"])) for row in rows[:-1]}
    assert lengths <= {3, 4}  # of 24 tokens; the end of a document is no text
    with pytest.raises(UserError, match="cannot continue a text"):
        task.write("def", 3)
    assert task.sample() is None
