"""Sample from language models, and translate with greedy or beam search. Models must be in evaluation mode."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from kvt.models import CausalLM, Seq2Seq
from kvt.system import UserError, require_positive


def sample(
    model: CausalLM,
    prompt: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Continue prompts token by token; yield each new token, int64 (B, 1).

    Each token is drawn from softmax(logits / temperature) over the `top_k` most likely tokens. `top_p` restricts the
    choice further, to the smallest set of most likely tokens whose probabilities add up to at least `top_p` (Holtzman
    et al. 2020, nucleus sampling).

    Beyond `max_len` tokens (an attribute of the model's embedding), the model reads only the last `max_len` tokens (the
    window), and each new token needs a forward pass over the window. If `CausalLM.is_endless`, the caches slide
    instead: in every layer, a token attends to the last `max_len` tokens. Raises UserError if an argument is not
    allowed, or if logits are not finite.

    Args:
        prompt: tokens, int64 (B, N), at least one per row.
        tokens: number of tokens to add.
        temperature: at least 0; 0 always selects the most likely token.
        top_k: None means all tokens.
        top_p: above 0 and at most 1; None means 1.
        generator: random generator; None means the default generator of torch.
    """
    require_positive(tokens=tokens, top_k=1 if top_k is None else top_k)
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature} must be a finite number, at least 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p} must be above 0 and at most 1")
    if not prompt.shape[1]:
        raise UserError("the prompt is empty: give at least one symbol")
    max_len, slides = model.embedding.max_len, model.is_endless

    @torch.no_grad()
    def draw_tokens() -> Iterator[Tensor]:
        text, caches = prompt, model.make_caches()
        for _ in range(tokens):
            if text.shape[1] > max_len and not slides:
                text, caches = text[:, -max_len:], []
            unread = text[:, caches[0].length if caches else 0 :]
            logits = model.next_logits(unread[:, :max_len], caches)
            for late in unread[:, max_len:].unbind(1):  # tokens of a prompt that is longer than the window
                logits = model.next_logits(late[:, None], caches)
            token = _draw(logits, temperature, top_k, top_p, generator)
            yield token
            text = torch.cat([text, token], dim=1)

    return draw_tokens()


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token per row: (B, vocab_size) → int64 (B, 1)."""
    if not logits.isfinite().all():
        raise UserError("this model has diverged (its logits are not finite): use the checkpoint of another run")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits, tokens = logits.float().topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    # division by less than 1e-30 might overflow; a temperature of 1e-30 already draws only the most likely token
    probabilities = (logits / max(temperature, 1e-30)).softmax(-1)
    if top_p is not None:  # exclude a token if more likely tokens already have the total probability `top_p`
        probabilities = probabilities.masked_fill(probabilities.cumsum(1) - probabilities >= top_p, 0)
    return tokens.gather(1, torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def greedy(model: Seq2Seq, source: Tensor, *, bos: int, eos: int) -> list[list[int]]:
    """Translate a batch by greedy search.

    `source` contains padded sentences, int64 (B, M). The tokens `bos` and `eos` begin and end a translation. Returns
    the tokens of each translation without `bos` and `eos`, at most `model.max_len` tokens.
    """
    state = model.encode(source)
    translations: list[list[int]] = [[] for _ in source]
    rows = torch.arange(len(source))  # unfinished sentences, which stay in the batch
    tokens = source.new_full((len(source), 1), bos)
    for _ in range(model.max_len):
        tokens = model.next_logits(tokens, state).argmax(-1, keepdim=True)
        unfinished = tokens[:, 0] != eos
        if not unfinished.all():
            state.select(unfinished)
            rows, tokens = rows[unfinished.cpu()], tokens[unfinished]
        for row, token in zip(rows.tolist(), tokens[:, 0].tolist(), strict=True):
            translations[row].append(token)
        if not len(rows):
            break
    return translations


@torch.no_grad()
def beam_search(model: Seq2Seq, source: Tensor, *, bos: int, eos: int, beam: int) -> list[list[int]]:
    """Translate a batch by beam search, with arguments and result as in `greedy`; `beam` = 1 is greedy search.

    Each step extends the `beam` most likely unfinished translations of each sentence by a token. The result is the
    finished translation with the greatest mean log-probability per token, including `eos`. The search for a sentence
    stops if at least `beam` translations are finished and no unfinished translation has a greater mean than the best
    finished translation. At `model.max_len` tokens, every translation is finished.
    """
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in source]
    sentences = torch.arange(len(source))  # unfinished sentences; each has `beam` rows in the batch
    state = model.encode(source)
    state.select(torch.arange(len(source), device=source.device).repeat_interleave(beam))
    hypotheses = source.new_full((len(source), beam, 1), bos)
    scores = torch.zeros(len(source), beam, device=source.device)
    scores[:, 1:] = float("-inf")  # initially, all hypotheses of a sentence are equal: extend only the first
    for length in range(1, model.max_len + 1):
        logits = model.next_logits(hypotheses[:, :, -1].flatten()[:, None], state).float()
        vocab_size = logits.shape[-1]
        totals = scores.flatten()[:, None] + logits.log_softmax(-1)
        # at most `beam` of the 2 · beam candidates end with `eos`, one for each hypothesis: `beam` others remain
        best, index = totals.view(len(sentences), -1).topk(min(2 * beam, beam * vocab_size))  # (B, 2 · beam)
        origin, token = index // vocab_size, index % vocab_size
        ends = token == eos
        for row, rank in (ends[:, :beam] & best[:, :beam].isfinite()).nonzero().tolist():
            translation = hypotheses[row, origin[row, rank], 1:].tolist()
            finished[sentences[row]].append((best[row, rank].item() / length, translation))
        scores, rank = best.masked_fill(ends, float("-inf")).topk(beam)
        origin, token = origin.gather(1, rank), token.gather(1, rank)
        prefixes = hypotheses.gather(1, origin[..., None].expand(-1, -1, length))
        hypotheses = torch.cat([prefixes, token[..., None]], dim=-1)

        likeliest = (scores[:, 0] / length).tolist()
        pairs = zip(sentences.tolist(), likeliest, strict=True)
        continues = [len(finished[row]) < beam or max(finished[row])[0] < mean for row, mean in pairs]
        unfinished = torch.tensor(continues, device=source.device)
        rows = torch.arange(len(sentences), device=source.device)[:, None] * beam + origin
        state.select(rows[unfinished].flatten())
        sentences, hypotheses, scores = sentences[unfinished.cpu()], hypotheses[unfinished], scores[unfinished]
        if not len(sentences):
            break
    for row, sentence in enumerate(sentences.tolist()):  # a hypothesis without `eos` ends at `max_len`
        for total, translation in zip(scores[row].tolist(), hypotheses[row, :, 1:].tolist(), strict=True):
            finished[sentence].append((total / model.max_len, translation))
    return [max(candidates)[1] for candidates in finished]


def decode_sorted(
    decode: Callable[[Tensor], list[list[int]]],
    sources: Sequence[Sequence[int]],
    pad: int,
    progress: bool = False,
    batch_size: int = 200,
) -> list[list[int]]:
    """Return the translations in the order of `sources`. `decode` gets padded batches of sources of similar length."""
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    translations: dict[int, list[int]] = {}
    starts = range(0, len(order), batch_size)
    for first in tqdm(starts, desc="translating", leave=False, disable=None if progress else True):
        rows = order[first : first + batch_size]
        batch = pad_sequence([torch.tensor(sources[row]) for row in rows], batch_first=True, padding_value=pad)
        translations |= zip(rows, decode(batch), strict=True)
    return [translations[row] for row in range(len(sources))]
