"""A set of packed samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.contracts.data import Data, Sample, Samples


class Packed(Samples):
    """Samples of two documents each."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Sample:
        ids = np.random.default_rng(index).integers(0, 64, 13)
        labels = np.append(ids[1:], 1)
        labels[6] = -100
        return Sample(input_ids=ids, labels=labels, positions=np.array([*range(7), *range(6)]))

    def targets(self, index: int) -> int:
        return 12

    def total_rows(self, indices: Any) -> int:
        return 2 * len(indices)


PACKED = Data(train=Packed(), heldout=None, pad_id=0, packed=True, identity={})
