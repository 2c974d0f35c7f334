"""Tokens per second of decoding, beside the paper's way: no cache, sentences one by one, every map computed.

*Characters*: the paper's model (dim 192, depth 6, heads 3, window 64). Within the window, from one symbol to a full
window; beyond it, 500 symbols after one, with both settings of `--window`. The paper's way recomputes all logits of the
visible window for each symbol.

*Translation*: dim 128, depth 1, heads 4, vocabularies of 10,000, 1,000 sources of 4 to 20 tokens in batches of similar
length, 20 tokens each. The paper's way encodes a sentence once and recomputes the whole translation for each token; it
is timed on the first 50 sentences.

`kvt` runs as its commands do: fast float32 products for translation (kvt/system/hardware.py), torch's default for
characters, which is better for few rows; the paper's way runs with torch's default. Both keep freed memory.

Weights are random: no speed depends on them. Where both ways should write the same, that is checked. Each line has the
median rates and the median ratio, with the smallest and the greatest ratio in brackets.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from comparison import default_of_torch
from torch import Tensor

from kvt.attention import KV, QKV
from kvt.data.vocabulary import BOS_NUMBER, EOS_NUMBER, PAD_NUMBER
from kvt.models import CausalLM, Seq2Seq
from kvt.models.generation import decode_sorted, greedy, sample
from kvt.system.hardware import tune
from kvt.tasks import CharacterTask, TranslationTask

SYMBOLS = [str(number) for number in range(10_000)]
WINDOW, WORDS = 64, 20


class PaperQKV(QKV):
    """`QKV` that always computes its map."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k)  # overridden logits leave the fast kernels out


class PaperKV(KV):
    """`KV` that always computes its map."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k)


PAPER = {
    "qkv": f"{__name__}.PaperQKV",
    "kv": f"{__name__}.PaperKV",
    "kv+pos": "kvt.bench.literal.LiteralKVPos",
}


@torch.no_grad()
def paper_sample(model: CausalLM, prompt: Tensor, tokens: int) -> Tensor:
    """`sample` at temperature 0, recomputing all logits of the visible window for each token."""
    text = prompt
    for _ in range(tokens):
        text = torch.cat([text, model(text[:, -WINDOW:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return text[:, prompt.shape[1] :]


@torch.no_grad()
def paper_greedy(model: Seq2Seq, sources: Sequence[list[int]]) -> list[list[int]]:
    """`greedy`, sentence by sentence, recomputing the whole translation for each token."""
    translations = []
    for sentence in sources:
        state = model.encode(torch.tensor([sentence]))
        target = torch.tensor([[BOS_NUMBER]])
        while target.shape[1] <= model.max_len and target[0, -1] != EOS_NUMBER:
            x = model.decoder(model.target_embedding(target), state.memory, state.mask)
            following = model.generator(model.decoder_norm(x[:, -1])).argmax(-1, keepdim=True)
            target = torch.cat([target, following], dim=1)
        translations.append([token for token in target[0, 1:].tolist() if token != EOS_NUMBER])
    return translations


def our_greedy(model: Seq2Seq, sources: Sequence[list[int]]) -> list[list[int]]:
    """Translate as `kvt translate` does."""
    return decode_sorted(lambda batch: greedy(model, batch, bos=BOS_NUMBER, eos=EOS_NUMBER), sources, PAD_NUMBER)


def compare(name: str, ours: Callable[[], int], paper: Callable[[], int], repeats: int) -> None:
    """Print one line of the table; each call returns the number of tokens it wrote."""
    rates: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):  # the first warms up
        pair = []
        for decode in (ours, paper):
            start = perf_counter()
            pair.append(decode() / (perf_counter() - start))
        if repeat:
            rates.append((pair[0], pair[1]))
    fast, slow = (median(side) for side in zip(*rates, strict=True))
    ratios = [ours / paper for ours, paper in rates]
    print(
        f"| {name} | {fast:,.0f} | {slow:,.0f} | {median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f}) |",
        flush=True,
    )


def characters(attn: str, repeats: int) -> None:
    spec = {"vocab": SYMBOLS[:65], "length": WINDOW}
    model = CharacterTask(spec, attn).eval().model
    paper = CharacterTask(spec, PAPER[attn]).eval().model
    paper.load_state_dict(model.state_dict())
    for batch, tokens, window in ((1, 63, "exact"), (64, 63, "exact"), (1, 500, "exact"), (1, 500, "restart")):
        prompt = torch.zeros(batch, 1, dtype=torch.long)
        if window == "exact" and not torch.equal(
            torch.cat([*sample(model, prompt, 63, temperature=0)], dim=1), paper_sample(paper, prompt, 63)
        ):
            print(f"{attn}: the two write different texts")
        compare(
            f"characters, {attn}, batch {batch}, {tokens} tokens" + (f", {window}" if tokens > WINDOW else ""),
            default_of_torch(
                lambda: sum(token.numel() for token in sample(model, prompt, tokens, temperature=0, window=window))  # noqa: B023
            ),
            default_of_torch(lambda: paper_sample(paper, prompt, tokens).numel()),  # noqa: B023
            repeats if batch == 1 else 1,
        )


def translation(attn: str, repeats: int) -> None:
    spec = {"source": "de", "target": "en", "detok_rules": [[], []], "max_len": WORDS}
    spec |= {"source_vocab": SYMBOLS, "target_vocab": SYMBOLS}
    model = TranslationTask(spec, attn).eval().model
    with torch.no_grad():
        model.generator.bias[EOS_NUMBER] = -1e9  # no sentence ends early
    paper = TranslationTask(spec, PAPER[attn]).eval().model
    paper.load_state_dict(model.state_dict())
    lengths = torch.randint(4, WORDS + 1, (1000,)).tolist()
    sources = [torch.randint(PAD_NUMBER + 3, len(SYMBOLS), (length,)).tolist() for length in lengths]
    if our_greedy(model, sources[:50]) != paper_greedy(paper, sources[:50]):
        print(f"{attn}: the two translate differently")
    compare(
        f"translation, {attn}",
        lambda: sum(map(len, our_greedy(model, sources))),
        default_of_torch(lambda: sum(map(len, paper_greedy(paper, sources[:50])))),
        repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attn", nargs="+", default=[*PAPER], choices=PAPER, help="the attentions to measure")
    parser.add_argument(
        "--part", choices=("characters", "translation"), nargs="+", default=["translation", "characters"]
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tune()
    print("| | kvt, tokens/s | the paper's form, tokens/s | times as fast |\n|---|---|---|---|")
    for part in arguments.part:
        for attn in arguments.attn:
            {"characters": characters, "translation": translation}[part](attn, arguments.repeats)


if __name__ == "__main__":
    main()
