"""Decoding that replays CUDA graphs writes the same; on a CPU a stand-in runs the recorded operations again."""

from copy import deepcopy
from itertools import chain

import pytest
import torch

from kvt.cli.main import execute
from kvt.models.generation import sample
from kvt.run import graphs
from kvt.run.graphs import graph_decoding
from kvt.system.errors import UserError
from kvt.tasks import CharacterTask
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.small_models import KINDS, MAX_LEN, language_model, some

WRITTEN = MAX_LEN - 2  # tokens after a prompt of two, up to a full window


@pytest.fixture
def replayed(monkeypatch):
    """Let a CPU have graphs; return those that are captured."""
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    return RecordedGraphs(monkeypatch)


def written(model, prompt, tokens=WRITTEN, **settings):
    settings = {"temperature": 0.7, "generator": torch.Generator().manual_seed(0), **settings}
    return torch.cat([*sample(model, prompt, tokens, **settings)], dim=1).tolist()


def pair(*words, **settings):
    """Return the same model twice, the second with graphs."""
    eager = language_model(*words, **settings)
    graph_decoding(graphed := deepcopy(eager))
    return eager, graphed


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_texts_with_an_attention(kind, replayed):
    eager, graphed = pair(kind)
    for seed in range(3):
        prompt = some(3, 2, seed=seed)
        assert written(graphed, prompt) == written(eager, prompt)
    # the prompt draws the first token
    assert len(replayed.captured) == WRITTEN - 1
    assert replayed.replays == 3 * (WRITTEN - 1)


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
def test_the_same_texts_with_positions_of_a_model(positions, replayed):
    eager, graphed = pair("kv" if positions == "learned" else "qkv, rope", positions)
    for seed in range(2):
        assert written(graphed, some(1, 1, seed=seed)) == written(eager, some(1, 1, seed=seed))
    assert len(replayed.captured) == WRITTEN - 1


def test_the_same_texts_where_layers_share_keys(replayed):
    eager, graphed = pair("q-kv", depth=4, share=2)
    for seed in range(2):
        assert written(graphed, some(2, 3, seed=seed), 5) == written(eager, some(2, 3, seed=seed), 5)
    assert len(replayed.captured) == 4


def test_logits_are_the_same_bit_for_bit_and_stay(replayed):
    eager, graphed = pair("kv+pos")
    logits = []
    for model in (eager, graphed):
        caches = model.make_caches()
        with torch.no_grad():
            logits.append([model.next_logits(token, caches) for token in some(2, MAX_LEN).split(1, dim=1)])
        assert [cache.length for cache in caches] == [MAX_LEN] * len(caches)
    for ours, theirs in zip(*logits, strict=True):
        assert torch.equal(ours, theirs)


def test_each_size_of_batch_has_graphs_of_its_own(replayed):
    eager, graphed = pair("mla")
    for rows in (1, 4, 1, 4):
        assert written(graphed, some(rows, 2)) == written(eager, some(rows, 2))
    assert len(replayed.captured) == 2 * (WRITTEN - 1)


def test_texts_in_turns_keep_what_is_theirs(replayed):
    eager, graphed = pair("qkv")
    drawn = [sample(graphed, some(2, 2, seed=seed), WRITTEN, temperature=0) for seed in range(3)]
    turns = torch.cat([*chain.from_iterable(zip(*drawn, strict=True))], dim=1)
    for seed in range(3):
        assert turns[:, seed::3].tolist() == written(eager, some(2, 2, seed=seed), temperature=0)
    assert len(replayed.captured) == WRITTEN - 1


def test_texts_that_change_places_keep_their_caches(replayed):
    logits, rows = [], torch.tensor([1, 0])
    for model in pair("kv"):
        caches = model.make_caches()
        with torch.no_grad():
            for token in some(2, 3).split(1, dim=1):
                model.next_logits(token, caches)
            for cache in caches:
                cache.select(rows)
            logits.append(model.next_logits(some(2, 1), caches))
    assert torch.equal(*logits)


def test_a_text_goes_on_beyond_the_window(replayed):
    """By one graph more, of the whole window."""
    eager, graphed = pair("kv+pos")
    assert written(graphed, some(1, 1), tokens=3 * MAX_LEN) == written(eager, some(1, 1), tokens=3 * MAX_LEN)
    assert len(replayed.captured) == MAX_LEN


def test_caches_that_slide_run_as_ever(replayed):
    eager, graphed = pair("kv, rope", "none")
    assert graphed.is_endless
    for seed in range(2):
        texts = [written(model, some(2, 1, seed=seed), 3 * MAX_LEN) for model in (graphed, eager)]
        assert texts[0] == texts[1]
    assert len(replayed.captured) == MAX_LEN - 1


def test_gradients_and_training_run_as_ever(replayed):
    _, graphed = pair("kv")
    caches = graphed.make_caches()
    for token in some(1, 3).split(1, dim=1):
        assert graphed.next_logits(token, caches).requires_grad
    with torch.no_grad():
        graphed.train().next_logits(token, caches)
    assert not replayed.captured


def test_a_trained_weight_changes_what_is_written(replayed):
    eager, graphed = pair("kv")
    written(graphed, some(1, 2))
    for model in (eager, graphed):
        model.head.weight.data.neg_()
    assert written(graphed, some(1, 2)) == written(eager, some(1, 2))
    assert len(replayed.captured) == WRITTEN - 1


def test_what_no_graph_can_repeat_is_named(replayed):
    _, graphed = pair("kv")
    asks = graphed.head.register_forward_hook(lambda head, given, logits: logits * logits[0, 0].item())
    message = r"^--compile graph: operation not permitted .*: drop the flag$"
    with pytest.raises(UserError, match=message):
        written(graphed, some(1, 2))
    asks.remove()


def test_without_a_gpu_there_are_none():
    task = CharacterTask({"vocab": [*"abc"], "length": 4}, "kv")
    with pytest.raises(UserError, match=r"^--compile graph: needs one GPU: drop the flag$"):
        graph_decoding(task.model)


def test_kvt_generate_writes_the_same_with_them(replayed, trained, capsys):
    words = ["--ckpt_path", str(trained("characters")), "--tokens", "40", "--num_samples", "2"]
    texts = []
    capsys.readouterr()
    for more in ([], ["--compile", "graph"]):
        execute("generate", [*words, *more])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert replayed.replays >= 2 * 39  # the first symbol of each is drawn from the prompt
