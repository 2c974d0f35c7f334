"""Pictures of attention show what the model attended to, and the numbers beside them are right."""

import sys
from io import BytesIO
from math import log
from xml.dom import minidom

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rcParams
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close

import kvt
from kvt.attention import asymmetry, row_entropy
from kvt.commands import main
from kvt.run.load_checkpoint import Checkpoint, load
from kvt.system import UserError
from kvt.tasks import DigitLists, HumanNumbers, ImageTask, ListTask, NumberTask
from kvt.view import maps as view
from tests.conftest import SMALL, slow
from tests.helpers.layers import Case


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 9))
def test_asymmetry_is_the_norm_of_the_antisymmetric_part(seed, n):
    a = torch.randn(2, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    symmetric, rest = (a + a.mT) / 2, (a - a.mT) / 2
    assert_close(asymmetry(a), 2 * rest.norm(dim=(-2, -1)) / a.norm(dim=(-2, -1)))
    assert_close(asymmetry(symmetric), torch.zeros(2).double(), atol=1e-12, rtol=0)
    assert_close(asymmetry(rest), torch.full((2,), 2.0).double())
    assert asymmetry(0 * a).eq(0).all()


@given(m=st.integers(1, 50), certain=st.integers(0, 10))
def test_entropy_counts_the_tokens_that_share_a_row(m, certain):
    uniform, one = torch.full((1, 10 - certain, m), 1 / m).double(), torch.eye(m).double()[:1].expand(1, certain, m)
    assert_close(row_entropy(torch.cat([uniform, one], 1)).item(), (1 - certain / 10) * log(m))


@pytest.mark.parametrize("name", ["qkv", "qkv+pos", "x-kv", "q-kv", "mla", "kv", "kv+pos", "kv+phase", "k", "k+pos"])
def test_scores_are_symmetric_if_keys_are_queries_and_there_are_no_positions(name):
    case = Case(heads=4, group=1, head_dim=4, batch=2, length=6, seed=0)
    found = asymmetry(case.layer(name).scores(case.input()))
    assert found.max() < 1e-12 if name in ("kv", "k") else found.min() > 0.01


def a_layer(heads=2, n=5, m=5, labels=None, overlay=None) -> view.Layer:
    weights = torch.rand(heads, n, m).softmax(-1)
    return view.Layer("encoder.0.attention", weights, weights.log() if n == m else None, labels, overlay)


def panels_of(layers, title=""):
    """The panels of the picture, in the order in which they are drawn, without the bar of the scale."""
    return [axes for axes in view.draw(layers, title).axes if axes.images]


def shown(axes) -> np.ndarray:
    return np.asarray(axes.images[-1].get_array())


def test_each_panel_is_the_map_of_its_layer_and_head():
    layers = [a_layer(heads=1), a_layer(heads=3), a_layer(heads=3)]
    panels = panels_of(layers)
    expected = [weights.numpy() for layer in layers for weights in layer.weights]
    for axes, weights in zip(panels, expected, strict=True):
        np.testing.assert_array_equal(shown(axes), weights)
    corners = [axes.get_position() for axes in panels]
    assert len({round(c.x0, 6) for c in corners}) == 3
    assert len({round(c.y0, 6) for c in corners}) == 3
    assert all(0 <= c.x0 < c.x1 <= 1 and 0 <= c.y0 < c.y1 <= 1 for c in corners)


def test_equal_weights_are_equally_bright_in_all_maps_and_looking_at_all_alike_is_dark():
    sharp, even = torch.eye(16)[None], torch.full((1, 16, 16), 1 / 16)
    layers = [a_layer(1, 16, 16)._replace(weights=weights) for weights in (sharp, even)]
    assert len({axes.images[0].norm.vmax for axes in panels_of(layers)}) == 1
    (alone,) = panels_of(layers[1:])
    assert alone.images[0].norm(1 / 16) < 0.4


@pytest.mark.parametrize("weights", [torch.rand(1, 16, 16) / 1000, 10 + torch.rand(1, 16, 16), -torch.rand(1, 16, 16)])
def test_maps_without_a_softmax_end_at_their_largest_weight_and_have_no_entropy(weights):
    (axes,) = panels_of([a_layer(1, 16, 16)._replace(weights=weights)])  # no panel of eigenvalues
    assert axes.images[0].norm.vmax == pytest.approx(weights.max().item() if weights.max() > 0 else 1)
    assert f"row sum {weights.sum(-1).mean():.3g}" in axes.get_title()
    assert "entropy" not in axes.get_title()


def test_tokens_label_the_map_as_they_are_unless_there_are_too_many():
    rows, columns = ["$", "a_b^c", "$x$"], ["ja", "nein", "<eos>", "日"]
    (axes,) = panels_of([a_layer(1, 3, 4, (rows, columns))], "$title$")
    assert [label.get_text() for label in axes.get_yticklabels()] == rows
    assert [label.get_text() for label in axes.get_xticklabels()] == columns
    many = [f"token{i}" for i in range(view.MAX_LABELLED + 1)]
    (axes,) = panels_of([a_layer(1, len(many), len(many), (many, many))])
    assert not {label.get_text() for label in axes.get_xticklabels()} & set(many)


def test_the_class_token_looks_at_patches_where_they_are():
    spec = {"channels": 1, "height": 4, "width": 6, "classes": ["a", "b"], "mean": [0.5], "std": [0.5]}
    task = ImageTask(spec, patch=2, dim=8, depth=1, heads=2).eval()
    image = torch.randint(256, (1, 1, 4, 6), dtype=torch.uint8)
    (layer,) = view.collect_maps(task, (image, torch.tensor([0])))
    picture, heat = layer.overlay
    assert torch.equal(picture, image[0].permute(1, 2, 0))
    tokens: list[torch.Tensor] = []
    task.model.encoder[0].attention.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    task(image)
    for row in range(2):
        for column in range(3):
            changed = image.clone()
            changed[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += 1
            task(changed)
            (token,) = (tokens[0] != tokens[-1]).any(-1)[0].nonzero()
            assert_close(heat[:, row, column], layer.weights[:, 0, token.item()])
    panels = panels_of([layer])
    for head, (drawn, veiled) in enumerate(zip(panels[::2], panels[1::2], strict=True)):
        np.testing.assert_array_equal(shown(drawn), layer.weights[head].numpy())
        clear = 1 - shown(veiled)[..., 3] / 0.85  # as much as the patch gets
        np.testing.assert_allclose(clear, (heat[head] / heat[head].max()).numpy(), atol=1e-5)


def test_rings_mark_where_each_place_looks_on_average():
    data = DigitLists(task="reverse", length=6, train_size=16, val_size=48, test_size=1)
    data.setup("fit")
    task = ListTask(data.spec, attn="kv", dim=16, heads=2, depth=2).eval()
    layers = view.add_looks(view.collect_maps(task, data.example(0)), task, data.sample(48))
    maps = [view.collect_maps(task, data.example(index)) for index in range(48)]
    for n, layer in enumerate(layers):
        average = sum(example[n].weights for example in maps)
        average.diagonal(dim1=1, dim2=2).fill_(0)
        assert torch.equal(layer.looked_at, average.argmax(-1))
        assert_close(layer.symmetric, torch.ones(2))
    for axes, target in zip(panels_of(layers), torch.cat([layer.looked_at for layer in layers]), strict=True):
        rings = axes.collections[0].get_offsets()
        assert rings[:, 0].tolist() == target.tolist()
        assert rings[:, 1].tolist() == [*range(6)]
    assert len(view.describe_looks(layers)) == 4


def test_a_place_that_may_look_at_no_other_looks_at_itself():
    data = HumanNumbers(length=8, batch_size=2)
    data.setup("fit")
    task = NumberTask(data.spec, dim=16, heads=2, depth=1).eval()
    (layer,) = view.add_looks(view.collect_maps(task, data.example(0)), task, data.sample(16))
    assert layer.looked_at[:, 0].tolist() == [0, 0]
    assert (layer.looked_at[:, 1:] < torch.arange(1, 8)).all()


def test_the_last_panel_of_a_layer_has_the_eigenvalues_of_its_maps_unless_it_is_causal():
    turns = torch.eye(4).roll(1, 1)  # i to i + 1: the fourth roots of unity
    swaps = torch.eye(4).view(2, 2, 4).flip(1).reshape(4, 4)
    weights = torch.stack([turns, swaps])
    both = view.Layer("encoder.0.attention", weights, weights, None)
    both = both._replace(looked_at=weights.argmax(-1), symmetric=torch.ones(2))
    causal = both._replace(weights=torch.eye(4).expand(2, 4, 4))
    cross, diverged = both._replace(scores=None), both._replace(weights=torch.full((2, 4, 4), torch.nan))
    for layers in ([both, causal, cross], [causal, both], [both, diverged]):
        planes = [axes for axes in view.draw(layers, "").axes if "eigenvalues" in axes.get_title()]
        assert len(planes) == 1
        points = [dots.get_offsets() for dots in planes[0].collections]
        expected = [[(1, 0), (0, 1), (-1, 0), (0, -1)], [(1, 0), (1, 0), (-1, 0), (-1, 0)]]
        for head, roots in zip(points, expected, strict=True):
            assert sorted(map(tuple, head.round(6) + 0.0)) == sorted(roots)
    lines = view.describe_looks([both, causal])
    told = ["up to 1.00 off the real line", "from -1.00 to 1", "", ""]
    assert [line.partition("; eigenvalues ")[2] for line in lines] == told


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("SVG", b"<?xml")])
def test_any_vocabulary_can_be_written_in_every_format(tmp_path, ending, begins):
    labels = [view.visible(token) for token in ("\x0c", "\x1b", "\u202e", "日")]
    path = tmp_path / f"picture.{ending}"
    view.save(view.draw([a_layer(1, 4, 4, (labels, labels))], ""), path)
    assert path.read_bytes().startswith(begins)
    assert list(tmp_path.iterdir()) == [path]
    if ending == "SVG":
        minidom.parse(str(path))


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("config", ["reverse", *slow("mnist", "characters", "translation")])
def test_tensorboard_shows_the_picture_that_the_command_draws(experiment, config, monkeypatch, in_tmp_dir):
    run = experiment(config, *SMALL[config])["path"].parent
    last = run / "checkpoints" / "last.ckpt"
    task, data = load(last), Checkpoint(last).load_data()
    title = view.titled(task.hparams["attn"], view.examine(task, data.example(0)).caption)
    events = EventAccumulator(str(run), {"images": 0}).Reload()
    for layer in view.collect_maps(task, data.example(0)):
        last_one = events.Images(f"visual/attention/{view.in_words(layer.name)}")[-1]
        image = np.asarray(Image.open(BytesIO(last_one.encoded_image_string)).convert("RGB"))
        np.testing.assert_array_equal(image, view.pixels(view.draw([layer], title, columns=2)))

    monkeypatch.setattr(sys, "argv", ["kvt", "maps", "--ckpt_path", str(last), "--out", "mine.png"])
    main()
    assert Image.open("mine.png").width > 300


def test_recorded_maps_are_drawn_as_those_of_a_task(in_tmp_dir):
    data = DigitLists(length=6, train_size=64, val_size=16, test_size=16)
    data.setup("validate")
    task = ListTask(data.spec, attn="kv", dim=16, heads=2, depth=2).eval()
    digits = data.splits["val"][0]
    with kvt.record_maps(task.model) as maps:
        task(digits)
    of_task = view.collect_maps(task, data.example(3))
    tokens = [str(digit) for digit in digits[3].tolist()]
    assert of_task[0].labels == (tokens, tokens)
    figure = kvt.draw_maps(maps, "kv", example=3, tokens=tokens)
    np.testing.assert_array_equal(view.pixels(figure), view.pixels(view.draw(of_task, "kv")))
    unnamed = view.pixels(view.draw([layer._replace(labels=None) for layer in of_task], "kv"))
    np.testing.assert_array_equal(view.pixels(kvt.draw_maps(maps, "kv", example=3, tokens=["x"])), unnamed)
    with pytest.raises(UserError, match="no map was recorded"):
        kvt.draw_maps([])


def test_translation_labels_each_layer_with_the_words_it_looks_from_and_at(trained):
    best = trained("translation")
    data = Checkpoint(best).load_data()
    source, target = data.texts["val"][3]
    encoder, own, cross = view.collect_maps(load(best), data.example(3))
    german = ["<bos>", *source.removesuffix(".").split(), ".", "<eos>"]
    english = ["<bos>", *target.removesuffix(".").split(), "."]
    assert encoder.labels == (german, german)
    assert own.labels == (english, english)
    assert cross.labels == (english, german)
    assert [layer.scores is None for layer in (encoder, own, cross)] == [False, False, True]
    for layer in (encoder, own, cross):
        assert layer.weights.shape[1:] == tuple(map(len, layer.labels))


@pytest.mark.parametrize(("tokens", "told"), [("a‖−ßΣé", ""), ("価格は百円で", "価円格百")])
def test_characters_that_the_picture_cannot_show_are_named(tmp_path, capfd, monkeypatch, tokens, told):
    monkeypatch.setitem(rcParams, "font.family", ["DejaVu Sans"])
    layer = kvt.MultiheadAttention(8, 2)
    with kvt.record_maps(layer) as maps:
        layer(*[torch.zeros(6, 1, 8)] * 3)
    view.save(kvt.draw_maps(maps, tokens=[*tokens]), tmp_path / "maps.png")
    line = capfd.readouterr().err
    assert ("kvt maps --html" in line) == bool(told)
    assert all(letter in line for letter in told)
