"""Trainings whose memory is compared."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from memories import DRAWN
from pipeline.chain.plan import Plan, plan_file
from pipeline.planning.shapes import Topology

LOCAL = 8
"""GPUs of a node."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a strategy, and the settings of its training."""

    name: str
    model: Mapping[str, Any]
    """Fields of `model.hf`."""
    wrap: str = "fsdp"
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the wrap slot."""
    ranks: int = 1
    master: str = "fp32"
    compute: str = "bf16"
    reduce: str = "fp32"
    precision: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `precision.policy`."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `optimizer.adamw`."""
    length: int = 1024
    samples: int = 1
    """Samples of a micro-batch."""
    accumulation: int = 1
    chunk: int | None = None
    adapter: Mapping[str, Any] | None = None
    packed: bool = False

    def plan(
        self, folder: Path, *, device: str = "cuda", model: Mapping[str, Any] | None = None
    ) -> Plan:
        """Write the case, or with other fields of the model, as a recipe in the folder and check
        it."""
        folder.mkdir(exist_ok=True)
        given = self if model is None else dataclasses.replace(self, model=model)
        text, recipe = folder / "text.txt", folder / "recipe.yaml"
        text.write_text("text\n", "utf-8")
        recipe.write_text(yaml.safe_dump(given._recipe(text, device), sort_keys=False), "utf-8")
        return plan_file(recipe, forecast=True)

    def topology(self, device: str = "cuda") -> Topology:
        """Return nodes of eight GPUs."""
        return Topology(ranks=self.ranks, local_ranks=min(self.ranks, LOCAL), device=device)

    def _recipe(self, text: Path, device: str) -> dict[str, Any]:
        stages: dict[str, Any] = {"model": {"use": "model.hf", **self.model}}
        if self.adapter is not None:
            stages["adapter"] = {"use": "adapter.lora", **self.adapter}
        stages |= {
            "precision": {
                "use": "precision.policy",
                "master": self.master,
                "compute": self.compute,
                "reduce": self.reduce,
                **self.precision,
            },
            "data": {
                "use": "data.text",
                "files": str(text),
                "sequence_length": self.length,
                "documents_apart": self.packed,
            },
            "optimizer": {"use": "optimizer.adamw", **self.optimizer},
            "wrap": {"use": f"wrap.{self.wrap}", **self.strategy},
            "checkpoint": {"use": "checkpoint.sharded"},
            "train": {
                "use": "train.causal_lm",
                "steps": 1,
                "micro_batch_size": self.samples,
                "global_batch_size": self.samples * self.accumulation * self.ranks,
                "loss_chunk_size": self.chunk,
            },
        }
        launch = {"procs": self.ranks, "device": device}
        return {"name": "memory", "launch": launch, "stages": stages}


def hub(name: str, *, again: int | None = None) -> dict[str, Any]:
    """Return the fields of a well-known model; every `again`-th block is recomputed."""
    return {"path": name, "init": "random"} | _again(again)


def own(again: int | None = None, **config: Any) -> dict[str, Any]:
    """Return the fields of a model with its own config."""
    return {"config": config} | _again(again)


def _again(every: int | None) -> dict[str, Any]:
    return {} if every is None else {"activation_checkpointing": {"every": every}}


def llama(**config: Any) -> dict[str, Any]:
    """Return the config of a small Llama."""
    return {
        "model_type": "llama",
        "vocab_size": 4000,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    } | config


LLAMA_1B, LLAMA_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
LLAMA_70B, MISTRAL = "meta-llama/Llama-3.1-70B", "mistralai/Mistral-7B-v0.3"
QWEN2_5, QWEN3 = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B"
QWEN2_5_SMALL, QWEN3_SMALL = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B"

PHI4, PHI4_MINI = "microsoft/phi-4", "microsoft/Phi-4-mini-instruct"
GEMMA2, GEMMA3 = "google/gemma-2-9b", "google/gemma-3-1b-pt"
OLMO2, GRANITE = "allenai/OLMo-2-1124-7B", "ibm-granite/granite-3.1-2b-base"

PYTHIA = "EleutherAI/pythia-6.9b"
GPT2_XL = {
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
"""Fields without dropout: the CPU kernels that are traced keep more memory with it."""
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 1440,
    "intermediate_size": 1440,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
WINDOWS = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
}
EAGER = {"attention": "eager"}
DORA = {"rank": 16, "dora": True}
EIGHT_BITS = {"moments": "8bit"}
NARROW = {"moments": "8bit", "stochastic_rounding": True}
GRADIENTS_ONLY = {"sharding": "shard_grad_op"}
HYBRID = {"sharding": "hybrid_shard", "shard_size": 8}
LATE = {"reduce_every_microbatch": False}

WELL_KNOWN = (
    Case(name="Llama 1B", model=hub(LLAMA_1B), wrap="ddp", ranks=8),
    Case(name="Llama 1B fp32", model=hub(LLAMA_1B), wrap="ddp", ranks=8, compute="fp32"),
    Case(name="Llama 1B accumulated", model=hub(LLAMA_1B), wrap="ddp", ranks=4, accumulation=4),
    Case(
        name="Llama 1B in chunks", model=hub(LLAMA_1B), wrap="ddp", ranks=8, chunk=512, length=4096
    ),
    Case(name="Llama 1B again", model=hub(LLAMA_1B, again=1), wrap="ddp", ranks=8, length=4096),
    Case(name="Llama 1B alone", model=hub(LLAMA_1B), ranks=1),
    Case(name="Llama 8B", model=hub(LLAMA_8B), ranks=8),
    Case(name="Llama 8B again", model=hub(LLAMA_8B, again=1), ranks=8, length=8192),
    Case(name="Llama 8B every 4th", model=hub(LLAMA_8B, again=4), ranks=8, length=4096),
    Case(
        name="Llama 8B grad op",
        model=hub(LLAMA_8B, again=1),
        ranks=16,
        strategy=GRADIENTS_ONLY,
        length=4096,
        samples=2,
    ),
    Case(
        name="Llama 8B hybrid", model=hub(LLAMA_8B, again=1), ranks=64, strategy=HYBRID, length=4096
    ),
    Case(
        name="Llama 8B late", model=hub(LLAMA_8B, again=1), ranks=32, strategy=LATE, accumulation=4
    ),
    Case(name="Llama 8B fp32", model=hub(LLAMA_8B), ranks=16, compute="fp32", accumulation=2),
    Case(name="Llama 8B packed", model=hub(LLAMA_8B, again=1), ranks=8, packed=True, length=4096),
    Case(name="Llama 70B", model=hub(LLAMA_70B, again=1), ranks=64, length=4096, chunk=1024),
    Case(
        name="Llama 70B grad op", model=hub(LLAMA_70B, again=1), ranks=64, strategy=GRADIENTS_ONLY
    ),
    Case(
        name="Llama 70B, 2 samples",
        model=hub(LLAMA_70B, again=1),
        ranks=64,
        samples=2,
        accumulation=2,
    ),
    Case(name="Mistral 7B", model=hub(MISTRAL), ranks=8, length=2048),
    Case(name="Mistral 7B again", model=hub(MISTRAL, again=1), ranks=4, length=8192, chunk=2048),
    Case(name="Qwen2.5 7B", model=hub(QWEN2_5, again=1), ranks=8, length=4096),
    Case(name="Qwen2.5 0.5B", model=hub(QWEN2_5_SMALL), wrap="ddp", ranks=2, samples=4),
    Case(name="Qwen3 8B", model=hub(QWEN3, again=1), ranks=8, length=4096),
    Case(name="Qwen3 0.6B", model=hub(QWEN3_SMALL), wrap="ddp", ranks=2, samples=2, reduce="bf16"),
    Case(name="Qwen3 0.6B fp32", model=hub(QWEN3_SMALL), ranks=2, samples=2, compute="fp32"),
    Case(name="Llama 8B LoRA", model=hub(LLAMA_8B), ranks=8, adapter={"rank": 16}),
    Case(
        name="Llama 8B LoRA of q, v",
        model=hub(LLAMA_8B, again=1),
        wrap="ddp",
        ranks=2,
        adapter={"targets": ["q_proj", "v_proj"]},
    ),
    Case(
        name="Llama 70B LoRA",
        model=hub(LLAMA_70B, again=1),
        ranks=8,
        chunk=1024,
        adapter={"rank": 16},
    ),
    Case(name="Llama 8B QLoRA", model=hub(LLAMA_8B), ranks=2, adapter={"quantize": "nf4"}),
    Case(name="Phi 4", model=hub(PHI4, again=1), ranks=16, length=4096),
    Case(name="Phi 4 LoRA", model=hub(PHI4), ranks=4, adapter={"rank": 16}),
    Case(name="Phi 4 mini", model=hub(PHI4_MINI), wrap="ddp", ranks=8, length=2048, chunk=512),
    Case(name="Gemma 2 9B", model=hub(GEMMA2) | EAGER, ranks=8),
    Case(name="Gemma 2 9B again", model=hub(GEMMA2, again=1) | EAGER, ranks=8, length=8192),
    Case(name="Gemma 3 1B", model=hub(GEMMA3), wrap="ddp", ranks=8, length=2048),
    Case(name="Gemma 3 1B packed", model=hub(GEMMA3, again=1), ranks=2, packed=True, length=4096),
    Case(name="OLMo 2 7B", model=hub(OLMO2), ranks=8, length=2048),
    Case(name="OLMo 2 7B again", model=hub(OLMO2, again=1), ranks=4, length=4096, chunk=1024),
    Case(name="Granite 2B", model=hub(GRANITE), wrap="ddp", ranks=8),
    Case(name="Granite 2B LoRA", model=hub(GRANITE, again=1), ranks=2, adapter={"rank": 16}),
    Case(name="Pythia 6.9B", model=hub(PYTHIA), ranks=8, length=2048),
    Case(name="Pythia 6.9B again", model=hub(PYTHIA, again=1), ranks=4, length=2048, chunk=512),
    Case(name="GPT-2 XL", model=own(**GPT2_XL), ranks=2, samples=4),
    Case(name="GPT-2 XL again", model=own(1, **GPT2_XL), wrap="ddp", ranks=2, samples=4),
    Case(name="Llama 8B DoRA", model=hub(LLAMA_8B), ranks=8, adapter=DORA),
    Case(name="Llama 8B DoRA again", model=hub(LLAMA_8B, again=1), ranks=2, adapter=DORA),
    Case(name="Qwen3 0.6B DoRA", model=hub(QWEN3_SMALL), wrap="ddp", ranks=2, adapter=DORA),
    Case(name="Llama 1B, 8 bits", model=hub(LLAMA_1B), wrap="ddp", optimizer=EIGHT_BITS),
    Case(name="Llama 8B, 8 bits", model=hub(LLAMA_8B, again=1), ranks=8, optimizer=EIGHT_BITS),
    Case(
        name="Llama 1B, 8 bits, bf16",
        model=hub(LLAMA_1B, again=1),
        wrap="ddp",
        master="bf16",
        reduce="bf16",
        length=512,
        optimizer=NARROW,
    ),
    Case(
        name="Llama 8B, 8 bits, bf16",
        model=hub(LLAMA_8B, again=1),
        ranks=2,
        master="bf16",
        optimizer=NARROW,
    ),
    Case(
        name="Llama 8B, 8 bits, not compiled",
        model=hub(LLAMA_8B, again=1),
        ranks=8,
        optimizer=EIGHT_BITS | {"kernel": "single"},
    ),
    Case(name="MoE as Mixtral", model=own(**MIXTRAL), ranks=8),
    Case(name="MoE as Mixtral again", model=own(1, **MIXTRAL), ranks=8, length=4096, chunk=512),
    Case(name="MoE as Mixtral, DDP", model=own(1, **MIXTRAL), wrap="ddp", ranks=8),
    Case(name="MoE as GPT-OSS", model=own(1, **GPT_OSS) | EAGER, ranks=8, chunk=256),
    Case(name="Windows", model=own(**WINDOWS), ranks=8, length=4096),
    Case(name="Windows again", model=own(1, **WINDOWS), wrap="ddp", ranks=2, length=4096),
    Case(
        name="Llama 70B LoRA, ahead",
        model=hub(LLAMA_70B, again=1),
        ranks=8,
        length=4096,
        chunk=1024,
        accumulation=2,
        adapter={"rank": 16},
        strategy={"forward_prefetch": 1, "backward_prefetch": 2},
    ),
)


STRATEGIES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("ddp", {}),
    ("ddp", {"gradient_as_bucket_view": False}),
    ("fsdp", {}),
    ("fsdp", GRADIENTS_ONLY),
    ("fsdp", HYBRID),
    ("fsdp", LATE),
    ("fsdp", {"cpu_offload": True}),
    ("fsdp", {"forward_prefetch": 1, "backward_prefetch": 2}),
)
"""Strategies to draw from: wrap stage and its fields."""


def drawn(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield random shapes under random strategies."""
    random_ = random.Random(seed)
    for number in range(count):
        yield _draw(number, random_)


def _draw(number: int, random_: random.Random) -> Case:
    pick = random_.choice
    wrap, strategy = pick(STRATEGIES)
    return Case(
        name=f"{DRAWN}{number}",
        model=own(pick((None, 1, 3)), **_config(pick)),
        wrap=wrap,
        strategy=strategy,
        ranks=pick((8, 16, 64)) if strategy == HYBRID else pick((1, 2, 4, 8, 16, 64)),
        compute=pick(("bf16", "bf16", "fp32")),
        reduce=pick(("fp32", "fp32", "bf16")),
        length=pick((16, 64, 512, 1024, 4096)),
        samples=pick((1, 2, 4)),
        accumulation=pick((1, 2, 5)),
        chunk=pick((None, None, 256)),
        adapter=pick((None, None, None, {"rank": 16}, {"rank": 8, "quantize": "nf4"})),
        packed=pick((False, False, False, True)),
    )


def _config(pick: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    keys = pick((1, 2, 4, 8))
    config = {
        "model_type": pick(("llama", "mistral", "qwen2", "qwen3")),
        "vocab_size": pick((1000, 32000, 50000, 151936)),
        "head_dim": pick((64, 128)),
        "num_key_value_heads": keys,
        "num_attention_heads": keys * pick((1, 2, 4)),
        "num_hidden_layers": pick((6, 12, 24, 31)),
        "intermediate_size": pick((1000, 4096, 11008)),
        "tie_word_embeddings": pick((True, False)),
    }
    config["hidden_size"] = config["num_attention_heads"] * config["head_dim"]
    if config["model_type"] == "qwen2":
        del config["head_dim"]
    return config


SMALL = (
    Case(name="DDP", model=own(**llama()), wrap="ddp", length=256),
    Case(name="DDP accumulated", model=own(**llama()), wrap="ddp", length=256, accumulation=2),
    Case(name="DDP again, in chunks", model=own(1, **llama()), wrap="ddp", length=256, chunk=64),
    Case(name="DDP fp32", model=own(**llama()), wrap="ddp", length=256, compute="fp32"),
    Case(name="FSDP", model=own(**llama()), ranks=2, length=256),
    Case(
        name="FSDP again, accumulated", model=own(1, **llama()), ranks=4, length=256, accumulation=2
    ),
    Case(name="FSDP grad op", model=own(**llama()), ranks=4, length=256, strategy=GRADIENTS_ONLY),
    Case(
        name="FSDP hybrid, late",
        model=own(**llama()),
        ranks=4,
        length=256,
        accumulation=3,
        strategy={"sharding": "hybrid_shard", "shard_size": 2, **LATE},
    ),
    Case(name="FSDP packed", model=own(**llama()), ranks=2, length=256, packed=True),
    Case(
        name="FSDP tied, in chunks",
        model=own(**llama(tie_word_embeddings=True)),
        ranks=2,
        length=256,
        chunk=64,
    ),
    Case(
        name="GPT-2",
        ranks=2,
        length=128,
        model=own(model_type="gpt2", n_embd=128, n_layer=3, n_head=4, vocab_size=2000),
    ),
    Case(
        name="Gemma 2",
        wrap="ddp",
        length=128,
        model=own(
            model_type="gemma2",
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            vocab_size=2000,
            sliding_window=64,
        )
        | EAGER,
    ),
    Case(
        name="Mixtral",
        ranks=2,
        length=128,
        model=own(
            model_type="mixtral",
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            vocab_size=2000,
        ),
    ),
    Case(name="LoRA, FSDP", model=own(**llama()), ranks=2, length=256, adapter={"rank": 8}),
    Case(
        name="LoRA, DDP, again",
        model=own(1, **llama()),
        wrap="ddp",
        length=256,
        adapter={"rank": 8},
    ),
    Case(
        name="QLoRA, FSDP",
        model=own(**llama()),
        ranks=2,
        length=256,
        adapter={"rank": 8, "quantize": "nf4"},
    ),
    Case(
        name="DoRA, FSDP",
        model=own(**llama()),
        ranks=2,
        length=256,
        adapter={"rank": 8, "dora": True},
    ),
)
