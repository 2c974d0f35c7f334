"""What the language models share: windows of a text, perplexity, text generation."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvt.data.vocabulary import Vocabulary
from kvt.models import CausalLM
from kvt.models.generation import sample
from kvt.system.errors import UserError, require_seed
from kvt.tasks.base import Classification, MeanPerplexity
from kvt.tasks.causality import eval_mode, leaks_future

IGNORE = -100  # the target of padding, where nothing is predicted


class LanguageTask(Classification):
    """Predicts every symbol of a text from those before it; a batch is (symbols, next symbols), int64 (B, N) each."""

    unit = "tokens"
    needs = ("vocab", "length")
    separator: ClassVar[str]  # between the symbols of a text: "" for characters, " " for words
    model: CausalLM

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self.vocabulary = Vocabulary(spec["vocab"])
        self.metrics["val/ppl"] = MeanPerplexity()

    def check_causality(self) -> None:
        """Raise UserError if an output depends on a later token."""
        length = self.model.embedding.max_len
        symbols = torch.arange(length, device=self.device) % len(self.vocabulary.vocab)
        with eval_mode(self.model):
            if length > 1 and leaks_future(self.model.forward, symbols):
                raise UserError(f"--attn {self.hparams['attn']}: it attends to later tokens: make it obey `causal`")

    def num_predictions(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORE).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        computed = super().validation_step(batch, batch_idx)
        self.metrics["val/ppl"].update(computed["loss"], self.num_predictions(batch))
        return computed

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, list[str]]:
        """Return the text of each window, what follows each symbol, and the likeliest symbols instead."""
        inputs, targets = batch
        rows = {"input": inputs, "target": targets, "prediction": self(inputs).argmax(-1)}
        return {
            name: [self._text(row[real != IGNORE]) for row, real in zip(tokens, targets, strict=True)]
            for name, tokens in rows.items()
        }

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        symbols = self.vocabulary.decode(inputs[0][0].tolist())
        return symbols, symbols

    def write(
        self,
        prompt: str,
        tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        window: str = "exact",
    ) -> Iterator[str]:
        """Continue a prompt with `kvt.models.generation.sample`, which documents the settings, in eval mode.

        Returns:
            The prompt (default: the most frequent symbol), then each symbol as it is drawn, the separator before it.
        """
        require_seed(seed)
        prompt = prompt or self.vocabulary.vocab[0]
        encoded = self.vocabulary.encode(prompt.split() if self.separator else prompt)
        generator = torch.Generator(self.device).manual_seed(seed)
        symbols = torch.tensor([encoded], dtype=torch.long, device=self.device)  # (1, N)
        drawn = sample(
            self.model, symbols, tokens, temperature=temperature, top_k=top_k, generator=generator, window=window
        )
        return chain([self._text(symbols[0])], (f"{self.separator}{self._text(token[0])}" for token in drawn))

    def generate(self, prompt: str, tokens: int, **settings: Any) -> str:
        """Return the text that `write` continues, with the same settings."""
        return "".join(self.write(prompt, tokens, **settings))

    def sample(self) -> str:
        """Return two hundred symbols as a Markdown code block, always from the same random numbers."""
        return "\n".join(f"    {line}" for line in self.generate("", 200).splitlines())

    def _text(self, symbols: Tensor) -> str:
        return self.separator.join(self.vocabulary.decode(symbols.tolist()))


def windows(symbols: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut a text into adjacent windows that predict every symbol but the first once: int64 (M,) → two of (B, length).

    The last window is padded with symbol 0 in the inputs and with `IGNORE` in the targets.

    >>> windows(torch.tensor([5, 6, 7, 8, 9, 4]), 3)
    (tensor([[5, 6, 7],
            [8, 9, 0]]), tensor([[   6,    7,    8],
            [   9,    4, -100]]))
    """
    missing = -(len(symbols) - 1) % length
    inputs, targets = symbols[:-1], symbols[1:]
    inputs = torch.cat([inputs, inputs.new_zeros(missing)])
    targets = torch.cat([targets, targets.new_full((missing,), IGNORE)])
    return inputs.view(-1, length), targets.view(-1, length)
