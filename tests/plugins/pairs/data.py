"""Pairs of rows with a column for each token and one for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt

from pipeline import NO_TARGET, Context, Data, Sample, Samples


def weights(ids: np.ndarray) -> np.ndarray:
    """Return the column `weight` of tokens: a function of each token and its place in its row."""
    return (1 + ids % 5 + 0.25 * np.arange(len(ids))).astype(np.float32)


def reference(ids: np.ndarray) -> np.ndarray:
    """Return the column `reference` of a row: a function of all its tokens."""
    return np.array([-0.01 * float(ids.sum())], np.float32)


def row(number: int, vocabulary: int) -> Sample:
    """Return row `number`, of 3 to 14 tokens, of which the first are not trained on."""
    generator = np.random.default_rng(number)
    length, start = int(generator.integers(3, 15)), int(generator.integers(0, 3))
    ids = generator.integers(1, vocabulary, length + 1)
    labels = ids[1:].copy()
    labels[:start] = NO_TARGET
    own = ids[:-1]
    columns = {"weight": weights(own)}
    return Sample(input_ids=own, labels=labels, tokens=columns, rows={"reference": reference(own)})


def joined(rows: Sequence[Sample], *, apart: bool) -> Sample:
    """Return rows as the documents of one sample."""
    return Sample(
        input_ids=np.concatenate([one.input_ids for one in rows]),
        labels=np.concatenate([one.labels for one in rows]),
        positions=np.concatenate([np.arange(len(one.input_ids)) for one in rows]),
        tokens={"weight": np.concatenate([one.tokens["weight"] for one in rows])},
        rows={"reference": np.concatenate([one.rows["reference"] for one in rows])},
        apart=apart,
    )


@dataclass(frozen=True)
class Pairs(Samples):
    """`size` samples of one pair, or packed of one or two."""

    size: int
    vocabulary: int
    packed: bool
    first: int = 0
    """Number of the first pair."""

    def __len__(self) -> int:
        return self.size

    def _pairs(self, index: int) -> list[int]:
        """Return the numbers of a sample's pairs."""
        if not self.packed:
            return [self.first + index]
        start = self.first + index + (index + 1) // 2
        return [start, start + 1] if index % 2 else [start]

    def __getitem__(self, index: int) -> Sample:
        numbers = [2 * pair + place for pair in self._pairs(index) for place in (0, 1)]
        rows = [row(number, self.vocabulary) for number in numbers]
        return joined(rows, apart=not self.packed)

    def targets(self, index: int) -> int:
        return int((self[index].labels != NO_TARGET).sum())

    def total_rows(self, indices: np.ndarray) -> int:
        return sum(2 * len(self._pairs(index)) for index in indices.tolist())


@dataclass(frozen=True, kw_only=True)
class PairData:
    """Make pairs of random tokens."""

    samples: Annotated[int, Gt(0)] = 24
    """Number of samples."""

    packing: bool = False
    """Put one or two pairs in each sample."""

    def run(self, ctx: Context) -> Data:
        made = Pairs(self.samples, 101, self.packing)
        heldout = Pairs(5, 101, self.packing, first=1000)
        identity = {"pairs": self.samples, "packed": int(self.packing)}
        return Data(
            train=made, heldout=heldout, pad_id=0, packed=self.packing, group=2, identity=identity
        )
