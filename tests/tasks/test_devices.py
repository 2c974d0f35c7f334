"""What would fail, or be slow, on a GPU is found without one: tensors on two devices, waits of the host, float64.

Backward passes are on the meta device, where tensors have no values either. Not covered, as it needs them: when
decoding ends. `benchmarks/gpu.py` measures a true GPU.
"""

import pytest
import torch

from kvt.attention import ATTENTION, KV
from kvt.data.augment import random_resized_crop_flip
from kvt.data.loader import Batches
from tests.helpers.fake_gpu import GPU, Calls, fake_gpu
from tests.helpers.small_tasks import TASKS, small_batch, small_task

pytestmark = pytest.mark.slow  # half a minute
PRECISIONS = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16-mixed"])


REFUSED = (
    *("nll_loss2d_forward", "adaptive_avg_pool", "adaptive_max_pool", "avg_pool3d_backward", "fractional_max_pool"),
    *("max_unpool", "linear1d_backward", "bilinear2d_backward", "bicubic2d_backward", "trilinear3d_backward"),
    *("reflection_pad", "ctc_loss_backward", "put_.", "histc", "bincount", "median", "grid_sampler", "scatter_reduce"),
)
"""Operations that a GPU cannot repeat exactly and torch refuses under --deterministic true: their names begin, or are
parts of them, as in the documentation of `torch.use_deterministic_algorithms`."""


def refused(calls):
    names = {call.name.removeprefix("aten.") for call in calls}
    return {name for name in names if not name.startswith("index_put") and any(part in name for part in REFUSED)}


def two_steps(name, attn="kv", autocast=False, **gpu):
    """Return the calls of two training steps in a row, after the checks that hold for every task and attention."""
    task, found = small_task(name, attn=attn), []
    with fake_gpu(autocast, **gpu):
        task.to(GPU)
        assert {mean.device for mean in task.means.values()} == {GPU}
        batch = [tensor.to(GPU) for tensor in small_batch(name)]
        for _ in range(2):
            with Calls() as step:
                loss = task.training_step(batch, 0)
            torch.clear_autocast_cache()  # as at the end of `torch.autocast`
            assert (loss.device, loss.dtype) == (GPU, torch.float32)
            assert not step.copies, "the host waits for a copy"
            assert not step.doubles, "a GPU computes float64 slowly"
            assert not autocast or step.products() == {torch.bfloat16}
            assert not refused(step.calls), "--deterministic true is refused on a GPU"
            found.append(step.calls)
    return found


def require_graphs(first, second):
    """Require steps of the same operations and shapes: CUDA graphs replay them, and nothing is compiled again."""
    assert first == second, "a step differs from the one before"


@PRECISIONS
@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"RecallTask"}))
def test_a_training_step_of_a_task_never_leaves_the_gpu(name, autocast):
    require_graphs(*two_steps(name, autocast=autocast))


@pytest.mark.parametrize("attn", [name for name in ATTENTION if name != "kv"])
def test_a_training_step_of_an_attention_never_leaves_the_gpu(attn):
    require_graphs(*two_steps("TranslationTask", attn, autocast=True))  # masks, causality, and neither


def backward(name, attn, step):
    """Differentiate what `step` computes of a task and a batch on the meta device, and require gradients there."""
    task = small_task(name, attn=attn).to("meta")
    with Calls() as calls:
        step(task, [tensor.to("meta") for tensor in small_batch(name)]).backward()
    assert not refused(calls.calls), "--deterministic true is refused on a GPU"
    assert {weight.grad.device.type for weight in task.parameters() if weight.grad is not None} == {"meta"}


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"RecallTask"}))
def test_gradients_of_a_task_stay_on_the_device(name):
    backward(name, "kv", lambda task, batch: task.training_step(batch, 0))


@pytest.mark.parametrize("attn", ATTENTION)
def test_gradients_of_an_attention_stay_on_the_device(attn):
    backward("TranslationTask", attn, lambda task, batch: task.training_step(batch, 0))


@PRECISIONS
def test_recall_waits_once_to_count_its_questions(autocast):
    """Their number differs between batches, and only their logits are computed: it decides the shapes."""
    _, calls = two_steps("RecallTask", autocast=autocast, waits=True)
    waits = [at for at, call in enumerate(calls) if call.counts]
    assert [calls[at].name for at in waits] == ["aten.nonzero.default"]
    assert not any("embedding" in call.name for call in calls[: waits[0]])  # while nothing is queued yet


@pytest.mark.parametrize("shuffle", [True, False])
def test_data_on_the_gpu_are_served_without_a_wait(shuffle):
    with fake_gpu(), Calls() as epoch:
        batches = [*Batches(torch.zeros(20, 3, device=GPU), batch_size=4, shuffle=shuffle, device=GPU)]
    assert {(batch.device, batch.shape) for (batch,) in batches} == {(GPU, (4, 3))}
    moves = [call for call in epoch.calls if call.name == "aten._to_copy.default"]
    assert len(moves) == shuffle  # the order of the epoch, and nothing in a step


def test_augmentation_never_leaves_the_gpu():
    with fake_gpu(), Calls() as step:
        images = random_resized_crop_flip(torch.zeros(3, 1, 8, 6, dtype=torch.uint8, device=GPU))
    assert (images.device, images.shape) == (GPU, (3, 1, 8, 6))
    assert not step.copies + step.doubles


@pytest.mark.parametrize("attn", ATTENTION)
def test_a_cached_step_of_decoding_never_leaves_the_gpu(attn):
    writer, translator = (small_task(name, attn=attn).eval() for name in ("CharacterTask", "TranslationTask"))
    with fake_gpu(), torch.no_grad():
        writer.to(GPU), translator.to(GPU)
        tokens, kept = torch.ones(2, 1, dtype=torch.long, device=GPU), torch.zeros(1, dtype=torch.long, device=GPU)
        with Calls() as calls:
            caches = writer.model.make_caches()
            state = translator.model.encode(tokens.expand(-1, 3))
            outputs = [writer.model.next_logits(tokens, caches) for _ in range(2)]
            outputs.append(translator.model.next_logits(tokens, state))
            state.select(kept)
            outputs.append(translator.model.next_logits(tokens[:1], state))
    assert {output.device for output in outputs} == {GPU}
    assert not calls.copies + calls.doubles


class HostTensor(KV):
    def forward(self, x, *args, **settings):
        return super().forward(x + torch.ones(x.shape[-1]), *args, **settings)


class Number(KV):
    def forward(self, x, *args, **settings):
        return super().forward(x, *args, **settings) * x.detach().sum().item()


class Upload(KV):
    def forward(self, x, *args, **settings):
        return super().forward(x, *args, **settings) * torch.tensor(2.0, device=x.device)


class Double(KV):
    def forward(self, x, *args, **settings):
        return super().forward(x.double().to(x.dtype), *args, **settings)


class Alternating(KV):
    steps = 0

    def forward(self, x, *args, **settings):
        self.steps += 1
        return super().forward(x, *args, **settings) + x[:, : self.steps].sum()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (HostTensor, "at least two devices"),
        (Number, "_local_scalar_dense"),
        (Upload, "waits for a copy"),
        (Double, "float64"),
        (Alternating, "differs"),
    ],
)
def test_a_fault_is_found(fault, message):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        require_graphs(*two_steps("NumberTask", f"{__name__}.{fault.__name__}"))


def loss_and_gradients(task, batch):
    task.zero_grad()
    loss = task.training_step([tensor.to(task.device) for tensor in batch], 0)
    loss.backward()
    # copies, because `task.to` moves the gradients that a task has, too
    copies = {name: weight.grad.clone().cpu() for name, weight in task.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach().cpu(), **copies}


def repeats_on(device, name, attn):
    """Require that a device computes a step as a CPU does, and twice the same, bit for bit."""
    task, batch = small_task(name, attn=attn).eval(), small_batch(name)  # evaluation: without dropout
    expected = loss_and_gradients(task, batch)
    torch.use_deterministic_algorithms(True)
    try:
        found, again = (loss_and_gradients(task.to(device), batch) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(again, found, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_gpu_computes_a_step_of_a_task_as_a_cpu_does_and_repeats_it(name, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    repeats_on("cuda", name, "kv+pos")


@pytest.mark.gpu
@pytest.mark.parametrize("attn", ATTENTION)
def test_a_gpu_computes_a_step_of_an_attention_as_a_cpu_does_and_repeats_it(attn, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    repeats_on("cuda", "TranslationTask", attn)
