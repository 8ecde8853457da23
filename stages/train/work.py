"""The arithmetic that an optimizer step cannot do without.

Products of matrices, and attention between tokens that see each other: all else is little. What may
not be computed is not counted, so that a time made from this is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.forecast.result import Work
from pipeline.forecast.shapes import BlockShape, ModelShape, Recomputed, SampleShape, Weight


def work(model: ModelShape, data: SampleShape, samples: int) -> Work:
    """Of a rank that trains on so many samples, in floating-point operations."""
    tokens = samples * data.length
    useful = again = 0
    graded = model.root[0].trained
    for place, block in enumerate(model.blocks):
        matrices = [weight for weight in block.weights if len(weight.shape) == 2]
        # Queries times keys, weights times values; a gradient of each of the four factors.
        attention = 2 * 2 * model.attention * samples * pairs(data, block)
        useful += tokens * _products(matrices, graded=graded) + attention * (3 if graded else 1)
        graded_at_end = graded or any(weight.trained for weight in block.weights)
        how = model.recomputed
        if graded_at_end and how is not None and place % how.every == 0:
            again += tokens * _again(matrices, how)
            again += attention if how.keep == "nothing" else 0
        graded = graded_at_end
    useful += tokens * _products([model.output], graded=graded)
    return Work(useful=float(useful), again=float(again))


def pairs(data: SampleShape, block: BlockShape) -> int:
    """Of a token and one that it sees, at least, in a sample: itself and what is before, as far as
    the block's window reaches. Documents that are packed may be of one token each."""
    length = data.length
    if data.packed:
        return length
    seen = min(block.window or length, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _products(matrices: Sequence[Weight], *, graded: bool) -> int:
    """For a token: forward, the gradient of what is multiplied where that is needed, and that of
    the matrix where it is trained."""
    return sum(2 * each.elements * (1 + graded + each.trained) for each in matrices)


def _again(matrices: Sequence[Weight], how: Recomputed) -> int:
    """For a token: all but the last product, whose result backward does not need (torch's
    checkpoint stops before it)."""
    if how.keep == "matmuls":
        return 0
    return sum(2 * each.elements for each in matrices[:-1])
