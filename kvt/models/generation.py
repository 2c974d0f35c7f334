"""Text from a trained model, token by token: sampled, greedy, or by beam search. Put the model in eval mode first."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from kvt.attention import KVCache
from kvt.models import CausalLM, Seq2Seq
from kvt.system.errors import UserError, require_positive, unknown

Decode = Callable[[Tensor], list[list[int]]]
"""From padded sources, int64 (B, M), to the tokens of their translations."""


def sample(
    model: CausalLM,
    prompt: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    window: str = "exact",
) -> Iterator[Tensor]:
    """Continues each prompt, token by token, each drawn from softmax(logits / temperature) of the `top_k` likeliest.

    A token depends on what stands before it in a window of `max_len` tokens, `max_len` being the model's. While the
    text fits in, past keys and values are cached, which changes nothing. Beyond,

    * "exact" slides the window: a token depends on the last `max_len`. Every token moves to another position, so all of
      the window is computed anew for each new token, which is slow;
    * "restart" keeps the last half of a full window, computes that anew once, and goes on with its keys and values
      cached: a token depends on half a window at least (rounded down), on a whole one at most.

    Args:
        model: a language model.
        prompt: int64 (B, N), at least one token.
        tokens: how many to add.
        temperature: above 1 wilder, below 1 tamer; 0 always takes the likeliest.
        top_k: draw among so many only; default: among all.
        generator: of the random numbers.
        window: "exact" or "restart".

    Returns:
        The tokens as they are drawn, int64 (B, 1) each.

    Raises:
        UserError: an empty prompt, a setting out of range; from the iterator, a model that has diverged.
    """
    require_positive(tokens=tokens, top_k=1 if top_k is None else top_k)
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature} must be a number, at least 0")
    if not prompt.shape[1]:
        raise UserError("the prompt is empty: give it one symbol at least")
    if window not in ("exact", "restart"):
        raise unknown("window", window, ["exact", "restart"])
    return _continue(model, prompt, tokens, temperature, top_k, generator, slides=window == "exact")


@torch.no_grad()
def _continue(
    model: CausalLM,
    text: Tensor,
    tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    slides: bool,
) -> Iterator[Tensor]:
    """Yields sampled tokens one by one, and keeps only those that the next one depends on."""
    max_len = model.embedding.max_len
    caches: Sequence[KVCache] | None = model.make_caches()
    for _ in range(tokens):
        if text.shape[1] > max_len:
            text = text[:, -(max_len if slides else max(1, max_len // 2)) :]
            caches = None if slides else model.make_caches()
        logits = model.next_logits(text[:, caches[0].length if caches else 0 :], caches)
        token = _draw(logits, temperature, top_k, generator)
        yield token
        text = torch.cat([text, token], dim=1)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One symbol a row: (B, vocab_size) → int64 (B, 1)."""
    if not logits.isfinite().all():
        raise UserError("what this model predicts is no number, it has diverged: take the checkpoint of another run")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits, symbols = logits.float().topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    # below 1e-30 only the likeliest is drawn anyway, and a quotient may overflow
    probabilities = (logits / max(temperature, 1e-30)).softmax(-1)
    return symbols.gather(1, torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def greedy(model: Seq2Seq, source: Tensor, *, bos: int, eos: int) -> list[list[int]]:
    """Translates a batch, always by the likeliest token. A finished sentence leaves the batch.

    Args:
        model: the translator.
        source: padded int64 (B, M).
        bos: the symbol that begins a translation.
        eos: the symbol that ends it.

    Returns:
        The tokens of each translation, without `bos` and `eos`, at most the model's `max_len`.
    """
    state = model.encode(source)
    written: list[list[int]] = [[] for _ in source]
    rows = torch.arange(len(source))
    tokens = source.new_full((len(source), 1), bos)
    for _ in range(model.max_len):
        tokens = model.next_logits(tokens, state).argmax(-1, keepdim=True)
        going = tokens[:, 0] != eos
        if not going.all():
            state.select(going)
            rows, tokens = rows[going.cpu()], tokens[going]
        for row, token in zip(rows.tolist(), tokens[:, 0].tolist(), strict=True):
            written[row].append(token)
        if not len(rows):
            break
    return written


@torch.no_grad()
def beam_search(model: Seq2Seq, source: Tensor, *, bos: int, eos: int, beam: int) -> list[list[int]]:
    """Translates a batch, following the `beam` likeliest beginnings of each sentence at once.

    Of the translations that ended, the one with the greatest mean log-probability a token (`eos` counted) wins. A
    sentence leaves the batch when `beam` of its translations have ended and the likeliest beginning has no greater
    mean: many that end too early do not stop a good one. With one beam this is `greedy`.

    Args:
        model: the translator.
        source: padded int64 (B, M).
        bos: the symbol that begins a translation.
        eos: the symbol that ends it.
        beam: number of beginnings.

    Returns:
        The tokens of each translation, without `bos` and `eos`, at most the model's `max_len`.

    Raises:
        UserError: `beam` is not positive.
    """
    require_positive(beam=beam)
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in source]
    sentences = torch.arange(len(source))  # those still in the batch, `beam` rows each
    state = model.encode(source)
    state.select(torch.arange(len(source), device=source.device).repeat_interleave(beam))
    written = source.new_full((len(source), beam, 1), bos)
    scores = torch.zeros(len(source), beam, device=source.device)
    scores[:, 1:] = float("-inf")  # at first all beams are the same
    for length in range(1, model.max_len + 1):
        logits = model.next_logits(written[:, :, -1].flatten()[:, None], state).float()
        vocab_size = logits.shape[-1]
        totals = scores.flatten()[:, None] + logits.log_softmax(-1)
        # of twice as many candidates at most half end, one for each beam
        best, index = totals.view(len(sentences), -1).topk(min(2 * beam, beam * vocab_size))  # (B, 2 beam)
        origin, symbol = index // vocab_size, index % vocab_size
        ends = symbol == eos
        for row, rank in (ends[:, :beam] & best[:, :beam].isfinite()).nonzero().tolist():
            translation = written[row, origin[row, rank], 1:].tolist()
            ended[sentences[row]].append((best[row, rank].item() / length, translation))
        scores, rank = best.masked_fill(ends, float("-inf")).topk(beam)
        origin, symbol = origin.gather(1, rank), symbol.gather(1, rank)
        written = torch.cat([written.gather(1, origin[..., None].expand(-1, -1, length)), symbol[..., None]], dim=-1)

        means = zip(sentences.tolist(), (scores[:, 0] / length).tolist(), strict=True)  # of the likeliest that goes on
        going = torch.tensor(
            [len(ended[sentence]) < beam or max(ended[sentence])[0] < mean for sentence, mean in means],
            device=source.device,
        )
        rows = torch.arange(len(sentences), device=source.device)[:, None] * beam + origin
        state.select(rows[going].flatten())
        sentences, written, scores = sentences[going.cpu()], written[going], scores[going]
        if not len(sentences):
            break
    for row, sentence in enumerate(sentences.tolist()):  # those that never came to an end
        for total, translation in zip(scores[row].tolist(), written[row, :, 1:].tolist(), strict=True):
            ended[sentence].append((total / model.max_len, translation))
    return [max(candidates)[1] for candidates in ended]


def decode_sorted(
    decode: Decode, sources: Sequence[Sequence[int]], pad: int, progress: bool = False, batch_size: int = 200
) -> list[list[int]]:
    """Decodes any number of sources in batches of like length; the translations come in the order of the sources."""
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    translations: dict[int, list[int]] = {}
    starts = range(0, len(order), batch_size)
    for first in tqdm(starts, desc="translating", leave=False, disable=None if progress else True):
        rows = order[first : first + batch_size]
        batch = pad_sequence([torch.tensor(sources[row]) for row in rows], batch_first=True, padding_value=pad)
        translations |= zip(rows, decode(batch), strict=True)
    return [translations[row] for row in range(len(sources))]
