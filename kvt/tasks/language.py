"""What language models share: a text in windows, perplexity, samples of what they write."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvt.data.vocabulary import Vocabulary
from kvt.models import CausalLM
from kvt.models.generation import sample
from kvt.system.errors import UserError, require_seed
from kvt.tasks.base import Classification
from kvt.tasks.causality import eval_mode, leaks_future
from kvt.tasks.metrics import MeanPerplexity

IGNORE = -100
"""The target where there is nothing to predict."""


class LanguageTask(Classification):
    """Predicts every symbol of a text from those before it; a batch is (symbols, symbols one further on).

    A subclass makes `self.model`, a `CausalLM`, and says `separator`.

    Args:
        spec: of the data; its "vocab" are the vocabulary.
    """

    unit = "tokens"
    needs = ("vocab", "length")
    separator: ClassVar[str]
    """What stands between two symbols of a text."""

    model: CausalLM

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self.vocabulary = Vocabulary(spec["vocab"])
        self.metrics["val/ppl"] = MeanPerplexity()

    def check_causality(self) -> None:
        """Makes sure that no symbol is predicted from those after it.

        Raises:
            UserError: one is.
        """
        length = self.model.embedding.max_len
        symbols = torch.arange(length, device=self.device) % len(self.vocabulary.vocab)
        with eval_mode(self.model):
            if length > 1 and leaks_future(self.model.forward, symbols):
                raise UserError(f"--attn {self.hparams['attn']}: it looks at what comes later: make it obey `causal`")

    def num_predictions(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The number of symbols to predict."""
        return (batch[1] != IGNORE).sum()

    def on_validation_batch_end(
        self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Adds a batch to the perplexity, exp(mean loss)."""
        self._metric("val", "ppl").update(outputs["loss"], self.num_predictions(batch))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, list[str]]:
        """What stands in each window, what follows, and the likeliest symbol in place of each that follows."""
        inputs, targets = batch
        rows = {"input": inputs, "target": targets, "prediction": self(inputs).argmax(-1)}
        return {
            name: [self._text(row[real != IGNORE]) for row, real in zip(tokens, targets, strict=True)]
            for name, tokens in rows.items()
        }

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        """The symbols."""
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
        """Continues a prompt with `kvt.models.generation.sample`. Put the task in eval mode first.

        Args:
            prompt: begins the text; default: the most frequent symbol.
            tokens: how many symbols to add.
            temperature: of the draw.
            top_k: draw among the likeliest only.
            seed: of the random numbers.
            window: what becomes of a full one.

        Returns:
            The prompt, then each symbol as it is drawn, with what separates it from the one before.

        Raises:
            UserError: a symbol of the prompt that the model does not know, a setting out of range.
        """
        require_seed(seed)
        words = prompt or self.vocabulary.vocab[0]
        begun = self.vocabulary.encode(words.split() if self.separator else words)
        generator = torch.Generator(self.device).manual_seed(seed)
        symbols = torch.tensor([begun], dtype=torch.long, device=self.device)
        drawn = sample(
            self.model, symbols, tokens, temperature=temperature, top_k=top_k, generator=generator, window=window
        )
        return chain([self._text(symbols[0])], (f"{self.separator}{self._text(token[0])}" for token in drawn))

    def generate(self, prompt: str, tokens: int, **settings: Any) -> str:
        """Return the text that `write` continues, with the same settings."""
        return "".join(self.write(prompt, tokens, **settings))

    def sample(self) -> str:
        """Two hundred symbols, always from the same random numbers."""
        text = self.generate("", 200)
        return "\n".join(f"    {line}" for line in text.splitlines())

    def _text(self, symbols: Tensor) -> str:
        return self.separator.join(self.vocabulary.decode(symbols.tolist()))


def windows(symbols: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A text as windows side by side, every symbol but the first predicted once: int64 (M,) → two of (B, length).

    The last window is filled up: with symbols 0 in the inputs, with `IGNORE` in the targets.

    >>> windows(torch.tensor([5, 6, 7, 8, 9, 4]), 3)[1].tolist()
    [[6, 7, 8], [9, 4, -100]]
    """
    missing = -(len(symbols) - 1) % length
    inputs, targets = symbols[:-1], symbols[1:]
    inputs = torch.cat([inputs, inputs.new_zeros(missing)])
    targets = torch.cat([targets, targets.new_full((missing,), IGNORE)])
    return inputs.view(-1, length), targets.view(-1, length)
