"""Parts of a training that `--accept` names, which may be another than in its checkpoint."""

from __future__ import annotations

PARTS = ("model", "weights", "tokenizer", "data", "seed", "shuffle", "global_batch_size")
"""The parts of a checkpoint's origin. `weights` are those that were not trained, and are taken from
the model."""
ACCEPTABLE = (*PARTS, "precision")
