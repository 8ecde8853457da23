"""Measurements of each row of a sample set: the held-out loss, its best, early stopping, and texts.

An engine measures the rows of a sample set, whatever it divides. Texts that the model writes while
it trains are such rows, whose measure chooses the token after each. So there is no cache: each
token costs a forward pass of the text so far, which a few short samples now and then may cost.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
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
    Measure,
    MicroBatch,
    ModelSource,
    Progress,
    Sample,
    Samples,
    ScoreRequest,
    Scores,
    StageError,
)
from pipeline.utils import plural
from stages.batches.feed import microbatch_ranges
from stages.batches.layout import micro_batch, pad
from stages.template_limits import Limited
from stages.train.settings import EarlyStopping, Generation

BLOCK = 16
"""Micro-batches on each rank whose results are shared at once."""


def rows_in_order(
    engine: Engine, measure: Measure, data: Data, samples: Samples, micro_batch_size: int,
    dist: DistContext, layout: Callable[[MicroBatch], MicroBatch] = lambda batch: batch, *,
    vocabulary: int | None = None,
) -> Generator[Tensor | None]:  # fmt: skip
    """Yield what `measure` says of each row of one of the data's sets, in order and block by block,
    on every rank; shape (rows, width), fp64 (collective). None, the last one, if a rank was asked
    to stop, after which no micro-batch is read. `layout` changes each micro-batch before it is
    measured. Tokens are compared with the size of the `vocabulary`, if that is given. Raises
    DataError for a sample that is not as the set says."""
    axis, total = engine.data_axis, len(samples)
    step = axis.count * micro_batch_size * BLOCK
    blocks = [(start, min(start + step, total)) for start in range(0, total, step)]
    shares = [
        [(a + start, a + end) for start, end in microbatch_ranges(b - a, axis, micro_batch_size)]
        for a, b in blocks
    ]
    stopped = False

    def batches() -> Iterator[MicroBatch]:
        nonlocal stopped
        for start, end in itertools.chain.from_iterable(shares):
            dist.heartbeat.beat()
            stopped = dist.any(dist.stop.asked)
            if stopped:
                return
            indices = range(start, end)
            yield layout(micro_batch(data, samples, indices, 0, engine.device, vocabulary)[0])

    with contextlib.closing(engine.evaluate(batches(), measure)) as results:
        for (first, last), share in zip(blocks, shares, strict=True):
            place = samples.total_rows(np.arange(first, share[0][0]))
            rows = place + samples.total_rows(np.arange(share[0][0], last))
            found = torch.zeros(rows, measure.width, dtype=torch.float64, device=engine.device)
            for part in itertools.islice(results, len(share)):
                if part is not None:
                    found[place : place + len(part)] = part
                    place += len(part)
            if stopped:
                yield None
                return
            yield engine.total(found)


def evaluate(
    engine: Engine, measure: Measure, data: Data, micro_batch_size: int, dist: DistContext,
    vocabulary: int | None = None,
) -> float | None:  # fmt: skip
    """Mean over all target tokens of the held-out samples of the first number that `measure` has
    for each row, its loss in nats (collective); None if a rank was asked to stop meanwhile. Raises
    DataError for a sample that is not as the set says, or has a token outside of the
    `vocabulary`."""
    assert data.heldout is not None
    total, size = 0.0, micro_batch_size
    blocks = rows_in_order(engine, measure, data, data.heldout, size, dist, vocabulary=vocabulary)
    with contextlib.closing(blocks):
        for rows in blocks:
            if rows is None:
                return None
            total += float(rows[:, 0].sum())
    return total / heldout_targets(data)


def heldout_targets(data: Data) -> int:
    """Target tokens of all held-out samples. Raises StageError if there are none."""
    assert data.heldout is not None
    found = data.heldout.total_targets(np.arange(len(data.heldout)))
    if not found:
        raise StageError("no held-out sample has a target token, so there is nothing to evaluate")
    return found


def set_metric(progress: Progress, name: str, value: float) -> None:
    """Set a metric, or remove it if the value is not finite."""
    progress.metrics.pop(name, None)
    if math.isfinite(value):
        progress.metrics[name] = value


def record_evaluation(
    progress: Progress, loss: float, stopping: EarlyStopping | None
) -> dict[str, float]:
    """Record an evaluation of the current weights; returns its numbers. A loss that is not finite
    is neither the best nor an improvement."""
    record = {"eval_loss": loss, "perplexity": math.inf if loss > 709 else math.exp(loss)}
    for name, value in record.items():
        set_metric(progress, name, value)
    finite = math.isfinite(loss)
    if finite and loss < progress.best.get("eval_loss", math.inf):
        progress.best = {"step": progress.step, "eval_loss": loss}
    if stopping is not None:
        patience = progress.patience
        known = patience.get("eval_loss", math.inf)
        if finite and loss < known and known - loss >= stopping.min_improvement:
            progress.patience = {"eval_loss": loss, "evaluations": 0}
        else:
            evaluations = patience.get("evaluations", 0) + 1
            progress.patience = {**patience, "evaluations": evaluations}
    return record


def reason_to_stop(progress: Progress, stopping: EarlyStopping) -> str:
    """Reason for early stopping; empty if training continues."""
    if progress.patience.get("evaluations", 0) < stopping.patience:
        return ""
    known = progress.patience.get("eval_loss")
    since = "was never a number" if known is None else f"has not improved on {known:.4f}"
    return f"eval_loss {since} in {plural(int(progress.patience['evaluations']), 'evaluation')}"


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
