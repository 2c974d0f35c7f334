"""Order and randomness are pure functions of (seed, epoch, batch)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from kvt.data.loader import Batches, SentenceBatches, move_storage, seed_generators
from kvt.system import UserError

ROWS = st.integers(1, 60)
SIZES = st.integers(1, 20)
PAD = 1
KINDS = pytest.mark.parametrize("kind", [Batches, SentenceBatches])


def corpus(lengths: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Padded sentences in two languages, full of numbers that tell row and language."""
    sides = ([torch.full((pair[i],), 2 * row + i + 2) for row, pair in enumerate(lengths)] for i in (0, 1))
    return [pad_sequence(side, batch_first=True, padding_value=PAD) for side in sides]


def random_lengths(count: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(0)
    source = (2.45 + 0.35 * torch.randn(count, generator=generator)).exp().round().clamp(3, 38).int() + 2
    target = (source + (1.8 * torch.randn(count, generator=generator)).round().int()).clamp(5, 42)
    return list(zip(source.tolist(), target.tolist(), strict=True))


def make(rows: int, kind: type[Batches] = Batches, **settings) -> Batches:
    """A loader whose batches end with the numbers of their rows."""
    if kind is Batches:
        return Batches(torch.arange(rows), **settings)
    return SentenceBatches(*corpus(random_lengths(rows)), pad=PAD, **settings)


def served(batches: Batches) -> list[tuple[list[int], float]]:
    """The rows of each batch, and what dropout would draw for it."""
    return [(rows.tolist(), torch.rand(()).item()) for *_, rows in batches]


@KINDS
@given(rows=ROWS, size=SIZES, epoch=st.integers(0, 5))
def test_an_epoch_visits_every_row_once(kind, rows, size, epoch):
    batches = make(rows, kind, batch_size=size, shuffle=True)
    batches.set_epoch(epoch)
    visited = [batch for *_, batch in batches]
    assert torch.cat(visited).sort().values.tolist() == list(range(rows))
    assert len(batches) == len(visited) == -(-rows // size)
    assert sorted(map(len, visited))[1:] == [size] * (len(visited) - 1)


def test_drop_last_leaves_out_the_short_batch():
    assert [len(b) for (b,) in make(10, batch_size=4, drop_last=True, shuffle=True)] == [4, 4]


@given(ROWS, SIZES)
def test_mixed_rows_are_each_served_once_in_the_same_order_in_every_epoch(rows, size):
    batches = make(rows, batch_size=size, mix=True)
    first = [b.tolist() for (b,) in batches]
    batches.set_epoch(1)
    assert [b.tolist() for (b,) in batches] == first
    assert sorted(row for batch in first for row in batch) == list(range(rows))


@KINDS
def test_the_order_depends_on_seed_and_epoch_alone(kind):
    first = served(make(300, kind, batch_size=4, shuffle=True, seed=1))
    torch.rand(100)  # whatever ran before
    again = make(300, kind, batch_size=4, shuffle=True, seed=1)
    assert served(again) == first
    again.set_epoch(1)
    orders = [first, served(again), served(make(300, kind, batch_size=4, shuffle=True, seed=2))]
    assert len({frozenset(batch) for order in orders for batch, _ in order}) > 150  # other rows come together


@KINDS
@given(rows=ROWS, size=SIZES, data=st.data())
def test_a_new_loader_goes_on_where_the_state_was_taken(kind, rows, size, data):
    whole, killed, resumed = (make(rows, kind, batch_size=size, shuffle=True) for _ in range(3))
    expected = served(whole)
    stop = data.draw(st.integers(1, len(whole)))
    for _, _ in zip(range(stop), killed, strict=False):
        state = killed.state_dict()
    resumed.load_state_dict(state)
    if stop < len(whole):
        if data.draw(st.booleans()):  # else the rest of the epoch is dropped
            assert served(resumed) == expected[stop:]
        resumed.set_epoch(1)
    whole.set_epoch(1)
    assert served(resumed) == served(whole)


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60)


@given(lengths=LENGTHS, size=SIZES, shuffle=st.booleans())
def test_a_batch_of_sentences_is_trimmed_to_the_longest_in_each_language(lengths, size, shuffle):
    sides = corpus(lengths)
    for *batch, numbers in SentenceBatches(*sides, pad=PAD, batch_size=size, shuffle=shuffle):
        for which, (part, whole) in enumerate(zip(batch, sides, strict=True)):
            longest = max(lengths[row][which] for row in numbers.tolist())
            assert torch.equal(part, whole[numbers, :longest])


def test_sentences_of_similar_length_come_together():
    def padding(batches):
        parts = [part for *batch, _ in batches for part in batch]
        return sum(int((part == PAD).sum()) for part in parts) / sum(part.numel() for part in parts)

    assert padding(make(6000, SentenceBatches, batch_size=50, shuffle=True)) < 0.1
    assert padding(make(6000, SentenceBatches, batch_size=50)) > 0.3


@given(st.integers(4, 60), st.integers(1, 5), st.integers(1, 4))
def test_processes_evaluate_every_row_once_in_order_and_in_turns(rows, size, world):
    """And take as many batches."""
    parts = [[b for (b,) in make(rows, batch_size=size, rank=r, world_size=world)] for r in range(world)]
    turns = [batch for together in zip(*parts, strict=True) for batch in together]
    assert torch.cat(turns).tolist() == list(range(rows))
    assert all(0 < len(batch) <= size + (world > 1) for batch in turns)


@given(st.integers(12, 60), st.integers(1, 4), st.integers(2, 3))
def test_processes_together_take_the_batches_of_one_with_larger_ones(rows, size, world):
    parts = [[b for (b,) in make(rows, batch_size=size, shuffle=True, rank=r, world_size=world)] for r in range(world)]
    one = [b for (b,) in make(rows, batch_size=world * size, shuffle=True)]
    for together, alone in zip(zip(*parts, strict=True), one, strict=False):  # of one process there may be a rest more
        assert torch.equal(torch.cat(together), alone)
    draws = [served(make(8, batch_size=2, shuffle=True, rank=r, world_size=2))[0][1] for r in range(2)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize(
    ("rows", "settings", "told"),
    [
        (5, {"batch_size": 0}, "batch_size=0"),
        (5, {"batch_size": 6, "shuffle": True, "drop_last": True}, "choose a smaller batch_size"),
        (3, {"batch_size": 4, "shuffle": True, "world_size": 2}, "choose a smaller batch_size"),
        (1, {"batch_size": 1, "world_size": 2}, "use fewer --devices"),
    ],
)
def test_sizes_that_leave_nothing_to_train_on(rows, settings, told):
    with pytest.raises(UserError, match=told):
        make(rows, **settings)


@given(st.integers(0, 2**63 - 1))
def test_the_generators_are_seeded_as_torch_seeds_them(seed):
    torch.manual_seed(seed)
    expected = torch.rand(3)
    seed_generators(seed)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_windows_of_a_text_are_moved_as_one_text_and_only_once(device):
    text = torch.arange(100)
    windows = text[5:].unfold(0, 8, 1)
    moved = move_storage(windows, torch.device(device))
    assert (moved.shape, moved.stride(), moved.storage_offset()) == (windows.shape, windows.stride(), 5)
    assert moved.untyped_storage().nbytes() == text.nbytes
    again = move_storage(moved, torch.device(device))
    assert again.untyped_storage()._cdata == moved.untyped_storage()._cdata


@pytest.mark.gpu
def test_a_gpu_is_served_the_same_rows_and_its_steps_wait_for_nothing():
    text = torch.arange(1000).unfold(0, 8, 1)
    ours, theirs = (Batches(text, batch_size=16, shuffle=True, device=torch.device(d)) for d in ("cpu", "cuda"))
    first, *_ = theirs  # an epoch, which moves the text
    batches = iter(theirs)
    first = next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rest = list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (cpu,), (gpu,) in zip(ours, [first, *rest], strict=True):
        assert gpu.is_cuda
        assert torch.equal(cpu, gpu.cpu())
