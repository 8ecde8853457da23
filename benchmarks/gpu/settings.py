"""The shapes that are trained, and the settings that are measured, in the order of their weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Fields = Mapping[str, Mapping[str, Any]]
"""Slot -> fields of its stage."""

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    # Llama 3.2 1B: 1.24 billion parameters, the embedding is the head too.
    "1b": LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    # Llama 3.1 8B.
    "8b": LLAMA | {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY: Mapping[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
"""Sizes of every shape where a processor does the work of a GPU."""
FEW: Mapping[str, Any] = {"vocab_size": 16384, "num_hidden_layers": 2}
"""Sizes of every shape for which blocks are compiled ahead."""
LENGTH, TINY_LENGTH = 4096, 64
"""Tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training that is measured."""

    name: str
    shape: str
    fields: Fields = field(default_factory=dict)
    """Fields of slots other than those of `recipe`."""
    micro: int = 1
    """Samples of a micro-batch."""
    accumulation: int = 1
    """Micro-batches of a step."""
    against: tuple[str, ...] = ()
    """Loops by hand that take turns with ours: `bare`, `trainer`."""
    steps: int = 3
    """Steps of a block."""
    rounds: int = 2
    """Blocks that count."""
    profile: bool = False
    """Whether a step is profiled behind the last block."""
    saves: bool = False
    """Whether the training goes to its end, with its saves, and is exported, instead of being cut
    into blocks."""
    memory: bool = False
    """Whether only the peak of memory is of interest: two such settings run at a time."""

    @property
    def batch(self) -> int:
        """Return the samples of a step."""
        return self.micro * self.accumulation

    @property
    def compiled(self) -> bool:
        """Return whether blocks are compiled."""
        return self.fields.get("model", {}).get("compile") is not None

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """Return the fields of the adapter; None if all weights are trained."""
        return self.fields.get("adapter")


def compiled(**model: Any) -> dict[str, Any]:
    """Return the model's fields with compiled blocks."""
    return {"model": {"compile": {}, **model}}


LORA = {"adapter": {"use": "adapter.lora", "rank": 16, "alpha": 32}}
NARROW_LORA = {
    "adapter": {"use": "adapter.lora", "rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}
}
"""Updates of two layers a block: nearly all of the work is that of a frozen backbone."""
AGAIN: Mapping[str, Any] = {"activation_checkpointing": {}}
WIDE = {"micro": 2, "accumulation": 4}
"""A step of the 1B shape: 32768 tokens."""
WIDER = {"micro": 2, "accumulation": 2}
"""A step of the 8B shape: 16384 tokens."""
LONG = {"micro": 1, "accumulation": 4}
"""The same, for two loops at a time, one of which has all logits in memory."""

SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="1b compiled", shape="1b", fields=compiled(), **WIDE, against=("bare",), rounds=5,
        steps=2,
    ),
    Setting(
        name="8b lora compiled", shape="8b", fields=compiled() | LORA, **WIDER, steps=2,
        profile=True,
    ),
    Setting(name="8b lora fp8", shape="8b", fields=compiled(fp8={}) | LORA, **WIDER, steps=2),
    Setting(name="8b lora eager", shape="8b", fields=LORA, **WIDER, steps=2),
    Setting(
        name="1b compiled, trainer", shape="1b", fields=compiled(), **WIDE, against=("trainer",),
        rounds=3, steps=2,
    ),
    Setting(name="1b eager", shape="1b", **WIDE),
    Setting(name="8b backbone", shape="8b", fields=compiled() | NARROW_LORA, **WIDER, steps=2),
    Setting(
        name="8b lora compiled, bare", shape="8b", fields=compiled() | LORA, **LONG, steps=2,
        against=("bare",), rounds=4,
    ),
    Setting(name="1b fp8", shape="1b", fields=compiled(fp8={}), **WIDE),
    Setting(name="1b recompute, compiled", shape="1b", fields=compiled(**AGAIN), micro=8),
    Setting(
        name="1b packed, flex", shape="1b",
        fields=compiled(attention="flex_attention") | {"data": {"documents_apart": True}}, **WIDE,
    ),
    Setting(
        name="1b saves", shape="1b", micro=2, saves=True,
        fields={"train": {"steps": 9}, "checkpoint": {"every": 3, "keep": 1}},
    ),
    Setting(name="1b recompute", shape="1b", fields={"model": AGAIN}, micro=4, memory=True),
    Setting(
        name="1b fsdp", shape="1b", fields={"wrap": {"use": "wrap.fsdp"}}, **WIDE, memory=True,
    ),
    Setting(
        name="8b lora recompute", shape="8b", fields={"model": AGAIN} | LORA, micro=2,
        memory=True,
    ),
    Setting(
        name="1b all logits", shape="1b", fields={"train": {"loss_chunk_size": None}}, micro=2,
        memory=True,
    ),
    Setting(
        name="1b recompute all but attention", shape="1b",
        fields={"model": {"activation_checkpointing": {"keep": "attention"}}}, micro=4,
        memory=True,
    ),
    Setting(name="8b backbone, eager", shape="8b", fields=NARROW_LORA, micro=1, memory=True),
)  # fmt: skip


def warming(setting: Setting) -> Setting:
    """Return the setting for a model of few blocks, whose run leaves the code that torch compiles
    for the blocks in its cache."""
    return replace(setting, steps=1, rounds=1, profile=False)


def tiny(setting: Setting) -> Setting:
    """Return the setting for a processor: blocks compiled without a compiler, 8 bits emulated, few
    steps."""
    fields = {slot: dict(values) for slot, values in setting.fields.items()}
    model = fields.get("model", {})
    if "compile" in model:
        model["compile"] = {"backend": "aot_eager"}
    if "fp8" in model:
        model["fp8"] = {"emulate": True}
    if model.get("attention") == "flex_attention":  # which computes no gradients there
        model["attention"] = "sdpa"
    return replace(setting, fields=fields, steps=1, rounds=min(setting.rounds, 2))


def recipe(setting: Setting, *, model: str, text: str, length: int, device: str) -> dict[str, Any]:
    """Return the recipe of a setting, with the model in the folder `model`."""
    stages: dict[str, dict[str, Any]] = {
        "model": {"use": "model.hf", "path": model},
        "adapter": {},
        "precision": {"use": "precision.policy"},
        "data": {"use": "data.text", "files": text, "sequence_length": length},
        "optimizer": {"use": "optimizer.adamw", "lr": 1e-5},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {
            "use": "train.causal_lm",
            "steps": 1_000_000,
            "micro_batch_size": setting.micro,
            "global_batch_size": setting.batch,
            "loss_chunk_size": 2048,
        },
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": "export.safetensors", "dtype": "bf16"},
    }
    for slot, values in setting.fields.items():
        stages[slot] |= values
    if not stages["adapter"]:
        del stages["adapter"]
    launch = {"procs": 1, "device": device}
    return {"name": "gpu", "seed": 7, "launch": launch, "stages": stages}
