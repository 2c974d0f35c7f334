"""Tokens a second of decoding, beside the paper's form of it: no cache, sentences one by one, every map made.

*Characters*: the paper's model (dim 192, depth 6, heads 3, window 64). Inside the window, from one symbol to a full
one; beyond it, 500 symbols after one, with both settings of `--window`. The paper's form computes all logits of the
visible window anew for each symbol.

*Translation*: dim 128, depth 1, heads 4, vocabularies of 10,000, 1,000 sources of 4 to 20 tokens in batches of like
length, 20 tokens each. The paper's form reads a sentence once and computes all that is written of it anew for each
token; it is timed on the first 50 sentences.

`kvt` is as its commands are: float32 products fast for translation (kvt/system/hardware.py), for characters as torch
comes, which suits few rows better; so are those of the paper's form. Both keep memory.

Weights are random: no speed depends on them. That both sides write the same is checked, where they should. Each line
has the medians of rates and ratios, in brackets the smallest and the greatest ratio.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from comparison import under
from torch import Tensor

from kvt.attention import KV, QKV, KVPos
from kvt.bench.literal import map_sinusoid
from kvt.data.sentences import BOS_NUMBER, EOS_NUMBER, PAD_NUMBER
from kvt.models import CausalLM, Seq2Seq
from kvt.models.generation import decode_sorted, greedy, sample
from kvt.system.hardware import fast_matmul, keep_memory
from kvt.tasks import CharacterTask, TranslationTask

SYMBOLS = [str(number) for number in range(10_000)]
WINDOW, WORDS = 64, 20


class PaperQKV(QKV):
    """`QKV` whose maps are always made."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """α · q kᵀ."""
        logits: Tensor = self.score(q, k)
        return logits


class PaperKV(KV):
    """`KV` whose maps are always made."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """α · q kᵀ."""
        logits: Tensor = self.score(q, k)
        return logits


class PaperKVPos(KVPos):
    """`KVPos` with its tensor of m channels, softmax(Linear_{m→1}(α K Kᵀ · 1_m + P)) V, a linear map for each head."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """See the class."""
        n, weight = q.shape[-2], self.to_logit.weight
        if not hasattr(self, "encoding"):
            self.encoding = map_sinusoid(self.max_len, weight.shape[1])
        channels = self.score(q, k).unsqueeze(-1) + self.encoding[:n, :n]  # (B, H, N, N, m)
        weight = weight.expand(self.heads, -1)[:, None, :, None]
        return (channels @ weight).squeeze(-1) + self.to_logit.bias[:, None, None]


PAPER = {"qkv": PaperQKV, "kv": PaperKV, "kv+pos": PaperKVPos}


@torch.no_grad()
def paper_sample(model: CausalLM, prompt: Tensor, tokens: int) -> Tensor:
    """`sample` at temperature 0: all logits of the visible window for each token."""
    text = prompt
    for _ in range(tokens):
        text = torch.cat([text, model(text[:, -WINDOW:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return text[:, prompt.shape[1] :]


@torch.no_grad()
def paper_greedy(model: Seq2Seq, sources: Sequence[list[int]]) -> list[list[int]]:
    """`greedy`, sentence by sentence in the order of state, all that is written computed anew for each token."""
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
    """As `kvt translate` does it."""
    return decode_sorted(lambda batch: greedy(model, batch, bos=BOS_NUMBER, eos=EOS_NUMBER), sources, PAD_NUMBER)


def compare(name: str, ours: Callable[[], int], paper: Callable[[], int], repeats: int) -> None:
    """One line of the table; each call returns how many tokens it wrote."""
    rates: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):  # the first is for warming up
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
    paper = CharacterTask(spec, f"{__name__}.{PAPER[attn].__name__}").eval().model
    paper.load_state_dict(model.state_dict())
    for batch, tokens, window in ((1, 63, "exact"), (64, 63, "exact"), (1, 500, "exact"), (1, 500, "restart")):
        prompt = torch.zeros(batch, 1, dtype=torch.long)
        if window == "exact" and not torch.equal(
            torch.cat([*sample(model, prompt, 63, temperature=0)], dim=1), paper_sample(paper, prompt, 63)
        ):
            print(f"{attn}: the two do not write the same")
        compare(
            f"characters, {attn}, batch {batch}, {tokens} tokens" + (f", {window}" if tokens > WINDOW else ""),
            lambda: len([*sample(model, prompt, tokens, temperature=0, window=window)]),  # noqa: B023 (called at once)
            lambda: paper_sample(paper, prompt, tokens).numel(),  # noqa: B023
            repeats if batch == 1 else 1,
        )


def translation(attn: str, repeats: int) -> None:
    spec = {"source": "de", "target": "en", "detok_rules": [[], []], "max_len": WORDS}
    spec |= {"source_vocab": SYMBOLS, "target_vocab": SYMBOLS}
    model = TranslationTask(spec, attn).eval().model
    with torch.no_grad():
        model.generator.bias[EOS_NUMBER] = -1e9  # no sentence ends early
    paper = TranslationTask(spec, f"{__name__}.{PAPER[attn].__name__}").eval().model
    paper.load_state_dict(model.state_dict())
    lengths = torch.randint(4, WORDS + 1, (1000,)).tolist()
    sources = [torch.randint(PAD_NUMBER + 3, len(SYMBOLS), (length,)).tolist() for length in lengths]
    if our_greedy(model, sources[:50]) != paper_greedy(paper, sources[:50]):
        print(f"{attn}: the two do not translate the same")
    compare(
        f"translation, {attn}",
        under(fast_matmul(), lambda: sum(map(len, our_greedy(model, sources)))),
        lambda: sum(map(len, paper_greedy(paper, sources[:50]))),
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
    keep_memory()
    print("| | kvt, tokens/s | the paper's form, tokens/s | times as fast |\n|---|---|---|---|")
    for part in arguments.part:
        for attn in arguments.attn:
            {"characters": characters, "translation": translation}[part](attn, arguments.repeats)


if __name__ == "__main__":
    main()
