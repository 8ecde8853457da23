"""Text that the model writes while it trains, under any strategy.

An engine measures the rows of a sample set, whatever it divides; here they are texts, and the
measure chooses the token after each. So there is no cache: each token costs a forward pass of the
text so far, which a few short samples now and then may cost.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import (
    NO_TARGET,
    Data,
    DistContext,
    Engine,
    MicroBatch,
    ModelSource,
    Sample,
    Samples,
    ScoreRequest,
    Scores,
    StageError,
)
from stages.batches.layout import pad
from stages.template_limits import Limited
from stages.train.evaluation import rows_in_order
from stages.train.settings import Generation

STRIDE = 64
"""Lengths are padded to multiples of this, so that few shapes occur."""
SHOWN = 40
"""Characters of a prompt that an error has."""


class TextGenerator:
    """Continues the prompts of a recipe with the weights that an engine holds."""

    def __init__(self, settings: Generation, source: ModelSource, seed: int) -> None:
        """Raise StageError if the model comes without a tokenizer or chat template that is needed,
        and for a prompt that the template refuses, without tokens, or with more than leave room for
        a text."""
        self._settings, self._seed, self._most = settings, seed, source.most_positions
        self._tokenizer = tokenizer = source.tokenizer()
        if settings.chat and not tokenizer.chat_template:
            raise StageError(
                f"generate: the tokenizer of {source.name} has no chat template",
                hint="use an instruction-tuned model, or leave out `generate.chat`",
            )
        render = Limited(tokenizer.apply_chat_template, source.name) if settings.chat else None
        self._prompts = list[list[int]]()
        for prompt in settings.prompts:
            begin = prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."
            message = {"role": "user", "content": prompt}
            try:
                encoded = render and render([message], add_generation_prompt=True, return_dict=True)
            except Exception as error:  # a template is a program of its own and may raise anything
                raise StageError(
                    f"generate: the chat template refuses prompt {begin!r}: {error}"
                ) from error
            encoded = encoded or tokenizer(prompt)
            ids = list(encoded["input_ids"])
            if not ids:
                raise StageError(
                    f"generate: prompt {prompt!r} has no tokens", hint="give it a text"
                )
            longest = len(ids) + settings.max_tokens - 1  # the last token is not read again
            if self._most is not None and longest > self._most:
                raise StageError(
                    f"generate: the text of prompt {begin!r} may have {longest} tokens, "
                    f"and the model has {self._most} positions",
                    hint="lower `generate.max_tokens`, or shorten the prompt",
                )
            self._prompts.append(ids)

    def generate(self, engine: Engine, dist: DistContext, step: int) -> list[dict[str, Any]] | None:
        """Continue every prompt (collective). Returns `number`, `prompt` and `text` of each; None
        if a rank was asked to stop meanwhile."""
        texts: list[list[int]] = [[] for _ in self._prompts]
        end = self._tokenizer.eos_token_id
        for position in range(self._settings.max_tokens):
            going = [n for n, text in enumerate(texts) if text[-1:] != [end]]
            if not going:
                break
            chooser = NextToken(self._settings.temperature, (self._seed, step, position))
            chosen: list[int] = []
            samples = Texts([(n, self._prompts[n] + texts[n]) for n in going])
            data = Data(train=samples, heldout=None, pad_id=0, identity={})
            for block in rows_in_order(engine, chooser, data, samples, 1, dist, self._layout):
                if block is None:
                    return None
                chosen += block[:, 0].int().tolist()
            for number, token in zip(going, chosen, strict=True):
                texts[number].append(token)
        written = (self._tokenizer.decode(text, skip_special_tokens=True) for text in texts)
        return [
            {"number": number, "prompt": prompt, "text": str(text)}
            for number, (prompt, text) in enumerate(
                zip(self._settings.prompts, written, strict=True)
            )
        ]

    def _layout(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch padded to one of few lengths, and to the most that the model has."""
        length = batch.input_ids.shape[1]
        longer = -(-length // STRIDE) * STRIDE
        return pad(batch, 1, max(min(longer, self._most or longer), length), packed=False)


@dataclass(frozen=True)
class Texts(Samples):
    """Texts so far, each with its number."""

    numbered: Sequence[tuple[int, Sequence[int]]]

    def __len__(self) -> int:
        return len(self.numbered)

    def __getitem__(self, index: int) -> Sample:
        number, ids = self.numbered[index]
        labels = np.full(len(ids), NO_TARGET)
        return Sample(input_ids=np.array(ids), labels=labels, rows={"number": np.array([number])})

    def targets(self, index: int) -> int:
        return 0


@dataclass
class NextToken:
    """Measure: the token after each text."""

    temperature: float
    """0 takes the most probable token."""
    seed: tuple[int, ...]
    width = 1
    request = ScoreRequest(logits=True)

    def __call__(self, scores: Scores, batch: MicroBatch) -> Tensor:
        chosen = []
        for logits, number in zip(scores.logits, batch.rows["number"].tolist(), strict=True):
            if self.temperature != 0:
                # With Gumbel noise, the largest is a sample of the distribution (Gumbel 1954).
                text = repr((*self.seed, number)).encode()
                generator = torch.Generator().manual_seed(zlib.crc32(text))
                uniform = torch.rand(len(logits), generator=generator).clamp(min=1e-20)
                noise = torch.log(-torch.log(uniform)).to(logits.device)
                logits = logits / self.temperature - noise
            chosen.append(logits.argmax())
        return torch.stack(chosen)[:, None]
