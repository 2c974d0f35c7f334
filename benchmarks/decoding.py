"""Tokens per second of decoding, compared with the paper's method: no cache, single sentences, every map computed.

*Characters*: the paper's model (dim 192, depth 6, heads 3, window 64). The prompt is one symbol. Two cases generate 63
symbols, which fill the window, for batches of 1 and 64; a third generates 500 symbols. The paper's method recomputes
all logits of the visible window for each symbol.

*Translation*: dim 128, depth 1, heads 4, vocabularies of 10,000 words, 1,000 sources of 4 to 20 tokens in batches of
similar length. Each translation has 20 tokens. The paper's method encodes a sentence once, and recomputes the whole
translation for each token. It translates only a twentieth of the sentences.

`kvt` translates with fast float32 products (kvt/tune.py). It generates characters with torch's default,
which is faster for few rows. The paper's method and other libraries use torch's default. Weights are random, because
the speed does not depend on them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from statistics import median
from typing import Any, NamedTuple

import torch
from comparison import begin, default_of_torch, flags, times
from peers import Write, gpt2, x_transformers_writer
from torch import Tensor

from kvt.attention import KV, QKV
from kvt.bench import number, timed
from kvt.markdown import markdown_table
from kvt.models import CausalLM, Seq2Seq
from kvt.models.generation import decode_sorted, greedy, sample
from kvt.tasks import CharacterTask, TranslationTask
from kvt.tasks.base import Task
from kvt.tasks.translation import BOS_ID, EOS_ID, PAD_ID

SYMBOLS = [str(number) for number in range(10_000)]
WINDOW, WORDS, SENTENCES = 64, 20, 1000
CPU = torch.device("cpu")
CHARACTERS = {"vocab": SYMBOLS[:65], "length": WINDOW}
SIZE = {"symbols": 65, "window": WINDOW, "dim": 192, "depth": 6, "heads": 3}
LIBRARIES = {"GPT-2 of transformers": gpt2, "x-transformers": x_transformers_writer}
Text = Tensor | list[list[int]]


class PaperQKV(QKV):
    """`QKV` that always computes its map."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k)  # a class that overrides `logits` does not use fused kernels


class PaperKV(KV):
    """`KV` that always computes its map."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k)


PAPER = {
    "qkv": f"{__name__}.PaperQKV",
    "kv": f"{__name__}.PaperKV",
    "kv+pos": "kvt.attention.literal.LiteralKVPos",
}


def our_sample(model: CausalLM, prompt: Tensor, tokens: int) -> Tensor:
    return torch.cat([*sample(model, prompt, tokens, temperature=0)], dim=1)


@torch.no_grad()
def paper_sample(model: CausalLM, prompt: Tensor, tokens: int) -> Tensor:
    """Return `tokens` greedy tokens after a prompt, recomputing all logits of the visible window for each token."""
    text = prompt
    for _ in range(tokens):
        text = torch.cat([text, model(text[:, -WINDOW:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return text[:, prompt.shape[1] :]


@torch.no_grad()
def paper_greedy(model: Seq2Seq, sources: Sequence[list[int]]) -> list[list[int]]:
    """Return greedy translations of single sentences, recomputing the whole translation for each token."""
    translations, device = [], model.generator.weight.device
    for sentence in sources:
        state = model.encode(torch.tensor([sentence], device=device))
        target = torch.tensor([[BOS_ID]], device=device)
        while target.shape[1] <= model.max_len and target[0, -1] != EOS_ID:
            x = model.decoder(model.target_embedding(target), state.memory, state.mask)
            following = model.generator(model.decoder_norm(x[:, -1])).argmax(-1, keepdim=True)
            target = torch.cat([target, following], dim=1)
        translations.append([token for token in target[0, 1:].tolist() if token != EOS_ID])
    return translations


def our_greedy(model: Seq2Seq, sources: Sequence[list[int]]) -> list[list[int]]:
    """Translate as `kvt translate` does."""
    device = model.generator.weight.device
    return decode_sorted(lambda batch: greedy(model, batch.to(device), bos=BOS_ID, eos=EOS_ID), sources, PAD_ID)


class Case(NamedTuple):
    """Two functions that generate text: `kvt`'s, and one of the paper or a library, which may generate fewer tokens."""

    name: str
    ours: Callable[[], Text]
    theirs: Callable[[], Text]


def both(task: Callable[..., Task], spec: dict[str, Any], attn: str, device: torch.device) -> tuple[Any, Any]:
    """Return `kvt`'s model and a model with the paper's attention and the same weights."""
    ours, papers = (task(spec, attn=name).eval().to(device).model for name in (attn, PAPER[attn]))
    papers.load_state_dict(ours.state_dict())
    return ours, papers


def characters(attn: str, device: torch.device = CPU) -> Iterator[Case]:
    ours, papers = both(CharacterTask, CHARACTERS, attn, device)
    for batch, tokens in ((1, 63), (64, 63), (1, 500)):
        yield text(f"batch {batch}, {tokens} tokens", ours, partial(paper_sample, papers), batch, tokens)


def compiled(attn: str) -> Iterator[Case]:
    """Yield a case within the window, in which torch compiles `kvt`'s step once for all numbers of tokens."""
    ours, papers = both(CharacterTask, CHARACTERS, attn, CPU)
    ours.next_logits = torch.compile(ours.next_logits, dynamic=True)
    yield text("batch 1, 63 tokens, compiled", ours, partial(paper_sample, papers), 1, 63)


def libraries(attn: str) -> Iterator[Case]:
    """Yield cases within the window. The libraries' models have the same size, QKV attention and their own caches."""
    ours = CharacterTask(CHARACTERS, attn=attn).eval().model
    for (library, make), batch in product(LIBRARIES.items(), (1, 64)):
        _, write = make(**SIZE)
        yield text(f"batch {batch}, 63 tokens, {library}", ours, write, batch, 63)


def text(name: str, ours: CausalLM, theirs: Write, batch: int, tokens: int) -> Case:
    prompt = torch.zeros(batch, 1, dtype=torch.long, device=next(ours.parameters()).device)
    return Case(
        name,
        default_of_torch(partial(our_sample, ours, prompt, tokens)),
        default_of_torch(partial(theirs, prompt, tokens)),
    )


def translation(attn: str, device: torch.device = CPU) -> Iterator[Case]:
    languages = {"source": "de", "target": "en", "source_vocab": SYMBOLS, "target_vocab": SYMBOLS}
    ours, papers = both(TranslationTask, {**languages, "detok_rules": [[], []], "max_len": WORDS}, attn, device)
    for model in (ours, papers):
        model.generator.bias.data[EOS_ID] = -1e9  # no sentence ends early
    lengths = torch.randint(4, WORDS + 1, (SENTENCES,)).tolist()
    sources = [torch.randint(PAD_ID + 3, len(SYMBOLS), (length,)).tolist() for length in lengths]
    few = sources[: SENTENCES // 20]
    yield Case("greedy", partial(our_greedy, ours, sources), default_of_torch(partial(paper_greedy, papers, few)))


PARTS = {"translation": translation, "characters": characters}


def row(case: Case, repeats: int) -> list[str]:
    ways = {"ours": case.ours, "theirs": case.theirs}
    tokens = {way: sum(map(len, write())) for way, write in ways.items()}
    rates = {way: [tokens[way] / s for s in seconds] for way, seconds in timed(ways, repeats).items()}
    return [case.name, *(number(median(each)) for each in rates.values()), times(rates["ours"], rates["theirs"])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags(__doc__, repeats=3)
    parser.add_argument("--attn", nargs="+", default=[*PAPER], choices=PAPER, help="the attentions to measure")
    parser.add_argument("--part", nargs="+", default=[*PARTS], choices=PARTS, help="kinds of text to generate")
    parser.add_argument("--compiled", action="store_true", help="also generate characters with a compiled step")
    parser.add_argument("--libraries", action="store_true", help="also generate characters with other libraries")
    asked = begin(parser, argv)
    torch.manual_seed(0)
    more = [compiled] * asked.compiled + [libraries] * asked.libraries
    for part, attn in product(asked.part, asked.attn):
        cases = chain(PARTS[part](attn), *(cases(attn) for cases in more if part == "characters"))
        rows = [row(case, asked.repeats) for case in cases]
        head = [f"{part}, {attn}", "kvt, tokens/s", "theirs, tokens/s", "times as fast"]
        print("", markdown_table([head, *rows]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
