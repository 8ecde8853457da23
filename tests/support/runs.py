"""Run stages by hand, without a recipe: a context, a toy sample set, a tiny model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import testing
from pipeline.contracts.data import Data, Sample, Samples
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from stages.model.hf import HfModel

TINY = {
    "model_type": "llama", "vocab_size": 101, "hidden_size": 24, "intermediate_size": 37,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def tiny_model(
    ctx: Context, fields: Mapping[str, Any], frozen: str, *, empty: bool = False
) -> ModelSource:
    """Return a tiny tied model of odd sizes with random weights. Parameters with `frozen` in their
    names are not trained; `empty` adds one without elements."""
    made = HfModel(config={**TINY, **fields}, init="random").run(ctx)
    build: Callable[[], Any] = made.build

    def build_frozen() -> Any:
        module = build()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (frozen and frozen in name))
        if empty:
            module.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 4)))
        return module

    made.build = build_frozen  # type: ignore[method-assign]
    return made


def context(dist: DistContext, run_dir: str | Path, seed: int = 7) -> Context:
    """Return a context without a log; rank 0 writes metrics."""
    log = logging.getLogger("pipe.test")
    log.setLevel(logging.CRITICAL)
    return replace(testing.context(run_dir, seed=seed, dist=dist), log=log)


def spied(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Return a list that grows by what `note` makes of the arguments of each call of a function,
    unless that is None."""
    original, found = getattr(owner, name), []

    def called(*given: Any, **named: Any) -> Any:
        found.extend(each for each in [note(*given)] if each is not None)
        return original(*given, **named)

    patch.setattr(owner, name, called)
    return found


class ListedSamples(Samples):
    """Samples in memory."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def targets(self, index: int) -> int:
        return int((self._samples[index].labels != -100).sum())


class ToySamples(ListedSamples):
    """Random tokens of uneven lengths. About a third of the labels are masked; some samples have no
    labels."""

    def __init__(self, size: int, vocab: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        super().__init__([self._make(generator, vocab, index) for index in range(size)])

    @staticmethod
    def _make(generator: Any, vocab: int, index: int) -> Sample:
        length = int(generator.integers(3, 20))
        tokens = generator.integers(0, vocab, length + 1)
        labels = tokens[1:].copy()
        labels[generator.random(length) < (1.0 if index % 7 == 3 else 0.3)] = -100
        return Sample(input_ids=tokens[:-1].astype(np.int64), labels=labels.astype(np.int64))


def toy_data(size: int = 40, vocab: int = 101) -> Data:
    """Return training and held-out samples with uneven target counts."""
    return Data(
        train=ToySamples(size, vocab, 1),
        heldout=ToySamples(9, vocab, 2),
        pad_id=0,
        identity={"contents": f"toy-{size}"},
    )


class PackedToySamples(ListedSamples):
    """Packed samples, each of one to three toy samples."""

    def __init__(self, documents: Samples) -> None:
        numbers = iter(range(len(documents)))
        sizes = itertools.cycle([2, 1, 3])
        groups = iter(lambda: list(itertools.islice(numbers, next(sizes))), [])
        super().__init__([_packed([documents[number] for number in group]) for group in groups])


def _packed(documents: list[Sample]) -> Sample:
    return Sample(
        input_ids=np.concatenate([one.input_ids for one in documents]),
        labels=np.concatenate([one.labels for one in documents]),
        positions=np.concatenate([np.arange(len(one.input_ids)) for one in documents]),
    )


def packed_data(size: int = 80, vocab: int = 101) -> Data:
    """Return the data of toy_data, packed."""
    return Data(
        train=PackedToySamples(ToySamples(size, vocab, 1)),
        heldout=PackedToySamples(ToySamples(9, vocab, 2)),
        pad_id=0,
        packed=True,
        identity={"contents": f"packed-{size}"},
    )
