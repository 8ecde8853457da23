"""One measurement, as plain data that travels to its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL: Mapping[str, Any] = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
"""A model of 5.31 million parameters."""

SEED = 7
LR, CLIP = 3e-4, 1.0


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A wrap stage with its fields, and the module and arguments of the same strategy by hand."""

    wrap: str
    fields: Mapping[str, Any]
    bare: str
    arguments: Mapping[str, Any]


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": Strategy(wrap="wrap.ddp", fields={}, bare="bare.ddp", arguments={}),
    "fsdp": Strategy(wrap="wrap.fsdp", fields={}, bare="bare.fsdp", arguments={}),
    "zero2": Strategy(
        wrap="wrap.zero", fields={"stage": 2}, bare="bare.zero", arguments={"stage": 2}
    ),
    "zero3": Strategy(
        wrap="wrap.zero", fields={"stage": 3}, bare="bare.zero", arguments={"stage": 3}
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One strategy on some processes in one dtype."""

    strategy: str
    procs: int
    compute: str
    device: str
    """`cpu` or `cuda`."""
    model: Mapping[str, Any] | str
    """Config of the model, or the path of a config.json."""
    length: int
    """Tokens of a sample."""
    micro_batch: int
    """Samples of one step on one rank."""
    rounds: int
    """Pairs of blocks, after a first pair that warms up."""
    steps: int
    """Optimizer steps of a block; our loop reports once in each block."""
    folder: Path
    """Folder of `tokens.bin`, results, and our run's files."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of each loop."""
        return self.steps * (self.rounds + 1)

    @property
    def global_batch(self) -> int:
        """Samples of one step on all ranks."""
        return self.micro_batch * self.procs

    @property
    def block_tokens(self) -> int:
        """Tokens that a block trains on, on all ranks."""
        return self.steps * self.global_batch * self.length

    @property
    def label(self) -> str:
        """Return strategy, processes and dtype, as in the table."""
        return f"{self.strategy} {self.procs}p {self.compute}"
