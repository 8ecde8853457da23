"""Text that the model writes while it trains, under any strategy.

An engine evaluates an objective on micro-batches, whatever it divides; here the objective chooses
the next token instead of computing a loss. So there is no cache: each token costs a forward pass of
the text so far, which is what a few short samples now and then may cost.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import NO_TARGET, DistContext, Engine, Heartbeat, MicroBatch, ModelSource, StageError
from pipeline.utils import local_part
from stages.data.template_limits import Limited
from stages.train.loss import model_output
from stages.train.settings import Generation
from stages.train.vocabulary import VocabularyShard

STRIDE = 64
"""Lengths are padded to multiples of this, so that few shapes occur."""
SHOWN = 40
"""Characters of a prompt that an error has."""


class Writer:
    """Continues the prompts of a recipe with the weights that an engine holds."""

    def __init__(self, settings: Generation, source: ModelSource, seed: int) -> None:
        """Raise StageError if the model comes without a tokenizer or chat template that is needed,
        and for a prompt that the template refuses, without tokens, or with more than leave room for
        a text."""
        self._settings, self._seed, self._most = settings, seed, source.most_positions
        self._tokenizer, self._source = source.tokenizer(), source
        if settings.chat and not self._tokenizer.chat_template:
            raise StageError(
                f"generate: the tokenizer of {source.name} has no chat template",
                hint="use an instruction-tuned model, or leave out `generate.chat`",
            )
        self._prompts = [self._encoded(prompt) for prompt in settings.prompts]
        for prompt, ids in zip(settings.prompts, self._prompts, strict=True):
            self._require_possible(prompt, len(ids))
        self._ends = _ends(self._tokenizer)

    def _encoded(self, prompt: str) -> list[int]:
        if not self._settings.chat:
            return list(self._tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}]
        try:
            render = Limited(self._tokenizer.apply_chat_template, self._source.name)
            encoded = render(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise StageError(
                f"generate: the chat template refuses prompt {_begin(prompt)!r}: {error}"
            ) from error
        return list(encoded["input_ids"])

    def _require_possible(self, prompt: str, tokens: int) -> None:
        if not tokens:
            raise StageError(f"generate: prompt {prompt!r} has no tokens", hint="give it a text")
        longest = tokens + self._settings.max_tokens - 1  # the last token is not read again
        if self._most is not None and longest > self._most:
            raise StageError(
                f"generate: the text of prompt {_begin(prompt)!r} may have {longest} tokens, and "
                f"the model has {self._most} positions",
                hint="lower `generate.max_tokens`, or shorten the prompt",
            )

    def write(self, engine: Engine, dist: DistContext, step: int) -> list[dict[str, Any]] | None:
        """Continue every prompt (collective). Returns `number`, `prompt` and `text` of each; None
        if a rank was asked to stop meanwhile."""
        texts: list[list[int]] = [[] for _ in self._prompts]
        for position in range(self._settings.max_tokens):
            going = [n for n, text in enumerate(texts) if not self._ends & set(text[-1:])]
            if not going:
                break
            if dist.any(dist.stop.asked):
                return None
            going_on = [(n, self._prompts[n] + texts[n]) for n in going]
            chooser = NextToken(self._settings.temperature, (self._seed, step, position))
            batches = _marked(going_on, engine.device, self._most)
            engine.evaluate(_with_signs(batches, dist.heartbeat), chooser)
            chosen = chooser.shared(len(texts), engine.device)
            for number in going:
                texts[number].append(chosen[number])
        return [
            {"number": number, "prompt": prompt, "text": self._decoded(text)}
            for number, (prompt, text) in enumerate(zip(self._settings.prompts, texts, strict=True))
        ]

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _begin(prompt: str) -> str:
    return prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."


def _ends(tokenizer: Any) -> set[int]:
    """Return the ids behind which a text has ended."""
    return {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()


def _marked(
    texts: Sequence[tuple[int, list[int]]], device: torch.device, most: int | None
) -> list[MicroBatch]:
    """Return a micro-batch of each text, padded to at most `most` tokens. The label of its last
    token, the only one, is its number."""
    longest = max(len(ids) for _, ids in texts)
    length = -(-longest // STRIDE) * STRIDE
    length = length if most is None else min(length, most)
    batches = []
    for number, ids in texts:
        input_ids = torch.zeros(1, length, dtype=torch.int64)
        labels = torch.full_like(input_ids, NO_TARGET)
        input_ids[0, : len(ids)] = torch.tensor(ids)
        labels[0, len(ids) - 1] = number
        real = torch.arange(length)[None] < len(ids)
        tensors = {"input_ids": input_ids, "labels": labels, "real": real}
        there: dict[str, Any] = {name: one.to(device) for name, one in tensors.items()}
        batches.append(MicroBatch(**there))
    return batches


def _with_signs(batches: Sequence[MicroBatch], heartbeat: Heartbeat) -> Iterator[MicroBatch]:
    for batch in batches:
        heartbeat.beat()
        yield batch


@dataclass
class NextToken:
    """Objective: chooses the token behind the marked one of each text, whose label is the text's
    number; the loss is 0."""

    temperature: float
    """0 takes the most probable token."""
    seed: tuple[int, ...]

    def __post_init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        logits, labels = model_output(model, batch).logits, batch.labels
        for row, column in torch.nonzero(labels != NO_TARGET).tolist():
            number = int(labels[row, column])
            self._chosen[number] = self._choose(logits[row, column], number)
        return torch.zeros((), device=labels.device)

    def _choose(self, logits: Tensor, number: int) -> Tensor:
        """Return the id that is chosen by logits of shape (vocabulary,), which ranks may divide."""
        if not isinstance(logits, DTensor):
            return self._scores(logits, number, 0, logits.shape[0]).argmax()
        shard = VocabularyShard.of(logits)
        scores = self._scores(local_part(logits), number, shard.first, logits.shape[0])
        return _argmax_over(scores, shard)

    def _scores(self, logits: Tensor, number: int, first: int, whole: int) -> Tensor:
        """Return the logits, over the temperature and with Gumbel noise, so that the largest one is
        a sample of the distribution (Gumbel 1954). The noise of a token does not depend on how the
        `whole` vocabulary is divided."""
        own = logits.to(torch.float32)
        if self.temperature == 0:
            return own
        generator = torch.Generator().manual_seed(zlib.crc32(repr((*self.seed, number)).encode()))
        uniform = torch.rand(whole, generator=generator).clamp(min=1e-20)
        noise = -torch.log(-torch.log(uniform))[first : first + len(own)]
        return own / self.temperature + noise.to(own.device)

    def shared(self, count: int, device: torch.device) -> list[int]:
        """Return the ids that were chosen for texts 0 to `count` - 1 on any rank, -1 for none
        (collective)."""
        found = torch.full((count,), -1, dtype=torch.int64, device=device)
        for number, chosen in self._chosen.items():
            found[number] = chosen
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        ids: list[int] = found.tolist()
        return ids


def _argmax_over(scores: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the id of the largest score of all ranks that share the vocabulary (collective)."""
    best = torch.full((2,), -torch.inf, dtype=torch.float64, device=scores.device)
    if shard.size:
        value, place = scores.max(0)
        best = torch.stack([value.double(), (place + shard.first).double()])
    found = [torch.empty_like(best) for _ in range(shard.group.size())]
    torch.distributed.all_gather(found, best, group=shard.group)
    values, ids = torch.stack(found).unbind(1)
    return ids[values.argmax()].long()
