"""Tokens a second of cached decoding beside recomputation, for every attention, measured in turns.

Characters: the paper's model (dim 192, depth 6, heads 3), from one symbol to a full window of 64. Translation: dim 128,
depth 1, heads 4, vocabularies of 10,000, sources of 13 tokens, 20 tokens each. Weights are random: no speed depends
on them. Each line is the median of the ratios, and of the rates; in brackets the smallest and the greatest ratio.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from kvt.attention import ATTENTION
from kvt.decoding import greedy, sample
from kvt.models import CausalLM, Seq2Seq
from kvt.tasks import CharacterTask, TranslationTask
from kvt.tasks.translation import BOS_NUMBER, EOS_NUMBER, PAD_NUMBER

SYMBOLS = [str(number) for number in range(10_000)]


@torch.no_grad()
def sample_recomputing(model: CausalLM, prompt: Tensor, tokens: int) -> Tensor:
    """`sample` at temperature 0 without a cache."""
    text = prompt
    for _ in range(tokens):
        text = torch.cat([text, model.next_logits(text).argmax(-1, keepdim=True)], dim=1)
    return text[:, prompt.shape[1] :]


@torch.no_grad()
def greedy_recomputing(model: Seq2Seq, source: Tensor, tokens: int) -> list[list[int]]:
    """`greedy` without caches, the source read once a token."""
    target = source.new_full((len(source), 1), BOS_NUMBER)
    for _ in range(tokens):
        target = torch.cat([target, model(source, target)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return target[:, 1:].tolist()


def compare(name: str, tokens: int, cached: Callable[[], object], plain: Callable[[], object], repeats: int) -> None:
    seconds: dict[str, list[float]] = {"cached": [], "plain": []}
    for repeat in range(repeats + 1):  # the first is for warming up
        for way, decode in (("cached", cached), ("plain", plain)):
            start = perf_counter()
            decode()
            if repeat:
                seconds[way].append(perf_counter() - start)
    ratios = [slow / fast for fast, slow in zip(seconds["cached"], seconds["plain"], strict=True)]
    rates = [f"{tokens / median(seconds[way]):,.0f}" for way in ("cached", "plain")]
    spread = f"{median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f})"
    print(f"| {name} | {rates[0]} | {rates[1]} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attn", nargs="+", default=[*ATTENTION], help="the attentions to measure")
    arguments = parser.parse_args()

    print("| | cached, tokens/s | recomputed, tokens/s | times as fast |\n|---|---|---|---|")
    for attn in arguments.attn:
        writer = CharacterTask({"symbols": SYMBOLS[:65], "length": 64}, attn).eval().model
        for batch in (1, 64):
            prompt = torch.zeros(batch, 1, dtype=torch.long)
            compare(
                f"characters, {attn}, batch {batch}",
                63 * batch,
                lambda: sample(writer, prompt, 63, temperature=0),  # noqa: B023 (called at once)
                lambda: sample_recomputing(writer, prompt, 63),  # noqa: B023
                arguments.repeats,
            )
    for attn in arguments.attn:
        spec = {"source": "de", "target": "en", "joints": [[], []], "max_len": 20}
        spec |= {"source_symbols": SYMBOLS, "target_symbols": SYMBOLS}
        translator = TranslationTask(spec, attn).eval().model
        with torch.no_grad():
            translator.generator.bias[EOS_NUMBER] = -1e9  # no sentence ends early
        source = torch.randint(PAD_NUMBER + 3, len(SYMBOLS), (50, 13))
        compare(
            f"translation, {attn}, batch 50",
            50 * 20,
            lambda: greedy(translator, source, bos=BOS_NUMBER, eos=EOS_NUMBER),  # noqa: B023
            lambda: greedy_recomputing(translator, source, 20),  # noqa: B023
            arguments.repeats,
        )


if __name__ == "__main__":
    main()
