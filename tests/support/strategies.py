"""The one list of strategies, which test matrices and benchmarks filter.

A new strategy is one entry here; its traits name the matrices that it is part of.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.chain.registry import Registry
from tests.support.tier import FULL

Trait = Literal["basic", "combines", "half", "resumes", "sharded", "replicated"]
"""Matrices of tests:

basic: every feature, optimizer and kind of anomaly under this strategy.
combines: every feature under this strategy.
half: training in bf16 and fp16, compared with the plain loop.
resumes: resuming from its own checkpoints and from those of other strategies.
sharded, replicated: loading a model's files, where a rank holds its shard or all of the weights.
"""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A wrap stage with settings."""

    use: str
    """Name of an installed stage, or `module:Class`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the stage as in a recipe."""
    title: str = ""
    """Name in docs/strategies.md."""
    traits: frozenset[Trait] = frozenset()
    group: int = 1
    """Number of ranks that it shards over; world sizes are multiples of it."""
    parity: tuple[int, ...] = ()
    """World sizes on which it is compared with the plain loop in fp32."""
    batching: Mapping[str, int] = field(default_factory=lambda: {"micro_batch_size": 2})
    """Fields of the train slot in that comparison."""

    def full_size(self) -> Strategy:
        """Return the strategy without the fields that suit tiny models only."""
        fields = {name: value for name, value in self.fields.items() if name not in FOR_TINY_MODELS}
        return replace(self, fields=fields)

    def stage(self) -> Any:
        """Build the stage."""
        from pydantic import TypeAdapter

        from pipeline.recipe.fields import adapter

        kind: TypeAdapter[Any] = adapter(self.kind())
        return kind.validate_python(dict(self.fields), strict=False)

    def kind(self) -> type:
        """Return the stage's class."""
        module, _, name = self.use.partition(":")
        if not name:
            return Registry.installed().load(self.use)
        found: type = getattr(importlib.import_module(module), name)
        return found


def _traits(*traits: Trait) -> frozenset[Trait]:
    return frozenset(traits)


MORE = (4,) if FULL else ()
"""World sizes of the full tier."""
UNEVEN = {"micro_batch_size": 3}
BASIC = _traits("basic", "combines", "half", "resumes")
COMBINES = _traits("combines", "resumes", *(("half",) if FULL else ()))
SHARDED = _traits("sharded")
REPLICATED = _traits("replicated")
RESUMES = _traits("resumes")
RESUMES_IN_FULL = _traits(*(("resumes",) if FULL else ()))
SMALL_GROUPS = {"param_persistence_threshold": 100}
"""Partitions tiny parameters too."""
ZERO3 = {"stage": 3, "sub_group_size": 9000, **SMALL_GROUPS}
FOR_TINY_MODELS = {"sub_group_size", *SMALL_GROUPS}
ACCELERATE_FSDP = """
distributed_type: FSDP
mixed_precision: 'no'
num_processes: -1
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""

STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy(use="wrap.ddp", title="DDP", traits=BASIC | REPLICATED, parity=(1, 2, 3)),
    "ddp static": Strategy(
        use="wrap.ddp", fields={"static_graph": True}, parity=(2,), batching=UNEVEN
    ),
    "ddp unused": Strategy(
        use="wrap.ddp", fields={"find_unused_parameters": True}, parity=(3,), batching=UNEVEN
    ),
    "ddp context": Strategy(
        use="wrap.ddp",
        fields={"context_parallel": {"size": 2}},
        traits=RESUMES | REPLICATED,
        group=2,
        parity=(2, *MORE),
    ),
    "powersgd": Strategy(
        use="tests.plugins.powersgd.powersgd:PowerSgd",
        fields={"rank": 2},
        traits=RESUMES | REPLICATED,
    ),
    "powersgd of full rank": Strategy(
        use="tests.plugins.powersgd.powersgd:PowerSgd", fields={"rank": 64}, parity=(2,)
    ),
    "fsdp full": Strategy(use="wrap.fsdp", title="FSDP", traits=BASIC | SHARDED, parity=(1, 2, 3)),
    "fsdp reduce once": Strategy(
        use="wrap.fsdp", fields={"reduce_every_microbatch": False}, parity=(2,)
    ),
    "fsdp grad-op": Strategy(
        use="wrap.fsdp",
        fields={"sharding": "shard_grad_op"},
        traits=RESUMES | SHARDED,
        parity=(1, 2),
        batching=UNEVEN,
    ),
    "fsdp no shard": Strategy(
        use="wrap.fsdp", fields={"sharding": "no_shard"}, traits=REPLICATED, parity=(1, 2)
    ),
    "fsdp hybrid": Strategy(
        use="wrap.fsdp",
        fields={"sharding": "hybrid_shard", "shard_size": 2},
        traits=RESUMES,
        group=2,
        parity=(4,),
        batching={"micro_batch_size": 1},
    ),
    "fsdp hybrid 1": Strategy(
        use="wrap.fsdp", fields={"sharding": "hybrid_shard", "shard_size": 1}, traits=RESUMES
    ),
    "fsdp offload": Strategy(
        use="wrap.fsdp", fields={"cpu_offload": True}, traits=RESUMES | SHARDED, parity=(2,)
    ),
    "fsdp ahead": Strategy(use="wrap.fsdp", fields={"forward_prefetch": 1}, parity=(2,)),
    "fsdp context": Strategy(
        use="wrap.fsdp",
        fields={"context_parallel": {"size": 2}},
        title="FSDP, context 2",
        traits=COMBINES | SHARDED,
        group=2,
        parity=(2, *MORE),
    ),
    "fsdp tensor": Strategy(
        use="wrap.fsdp",
        fields={"tensor_parallel": {"size": 2}},
        title="FSDP, tensor 2",
        traits=COMBINES,
        group=2,
        parity=(2, *MORE),
    ),
    "fsdp tensor 4": Strategy(
        use="wrap.fsdp",
        fields={"tensor_parallel": {"size": 4, "sequence": False}},
        traits=RESUMES,
        group=4,
        parity=MORE,
    ),
    "fsdp tensor context": Strategy(
        use="wrap.fsdp",
        fields={"tensor_parallel": {"size": 2}, "context_parallel": {"size": 2}},
        traits=RESUMES,
        group=4,
        parity=MORE,
    ),
    "fsdp pipeline": Strategy(
        use="wrap.fsdp",
        fields={"pipeline_parallel": {"size": 2}},
        title="FSDP, pipeline 2",
        traits=COMBINES,
        group=2,
        parity=(2, *MORE),
    ),
    **{
        f"fsdp pipeline {schedule}": Strategy(
            use="wrap.fsdp",
            fields={"pipeline_parallel": {"size": 2, "schedule": schedule}},
            group=2,
            parity=(2,) if FULL else (),
            batching={"micro_batch_size": 1},
        )
        for schedule in ("GPipe",)
    },
    "fsdp pipeline tensor": Strategy(
        use="wrap.fsdp",
        fields={"pipeline_parallel": {"size": 2}, "tensor_parallel": {"size": 2}},
        traits=RESUMES,
        group=4,
        parity=MORE,
    ),
    **{
        f"fsdp hybrid {axis}": Strategy(
            use="wrap.fsdp",
            fields={
                "sharding": "hybrid_shard",
                "shard_size": 2,
                f"{axis}_parallel": {"size": 2},
            },
            traits=RESUMES,
            group=4,
            parity=(ranks,) if FULL else (),
            batching={"micro_batch_size": 1},
        )
        for axis, ranks in (("tensor", 8), ("context", 4), ("pipeline", 8))
    },
    "fsdp 3D": Strategy(
        use="wrap.fsdp",
        fields={
            "pipeline_parallel": {"size": 2},
            "tensor_parallel": {"size": 2},
            "context_parallel": {"size": 2},
        },
        group=8,
        parity=(8,) if FULL else (),
    ),
    "zero1": Strategy(
        use="wrap.zero", fields={"stage": 1}, title="ZeRO-1", traits=BASIC | SHARDED, parity=(1, 2)
    ),
    "zero2": Strategy(
        use="wrap.zero",
        fields={"stage": 2},
        title="ZeRO-2",
        traits=BASIC | SHARDED,
        parity=(1, 2, 3),
        batching=UNEVEN,
    ),
    "zero2 context": Strategy(
        use="wrap.zero",
        fields={"stage": 2, "context_parallel": {"size": 2}},
        traits=RESUMES | SHARDED,
        group=2,
        parity=(2,),
    ),
    "zero3 context": Strategy(
        use="wrap.zero",
        fields={
            "stage": 3,
            "sub_group_size": 9000,
            "context_parallel": {"size": 2},
            **SMALL_GROUPS,
        },
        traits=RESUMES | SHARDED,
        group=2,
        parity=(2, *MORE),
    ),
    "zero2 round robin": Strategy(
        use="wrap.zero",
        fields={"stage": 2, "round_robin_gradients": True},
        traits=RESUMES | SHARDED,
    ),
    "zero3": Strategy(
        use="wrap.zero",
        fields=ZERO3,
        title="ZeRO-3",
        traits=BASIC | SHARDED,
        parity=(1, 2, 3),
    ),
    **{
        f"zero{stage} tensor": Strategy(
            use="wrap.zero",
            fields={"stage": stage, "tensor_parallel": {"size": 2}, **more},
            title="ZeRO-3, tensor 2" if stage == 3 else "",
            traits=COMBINES if stage == 3 else RESUMES_IN_FULL,
            group=2,
            parity=(2, *MORE) if stage == 3 or FULL else (),
        )
        for stage, more in ((1, {}), (2, {}), (3, {"sub_group_size": 9000, **SMALL_GROUPS}))
    },
    "zero3 sub-groups": Strategy(
        use="wrap.zero",
        fields={"stage": 3, "sub_group_size": 2000, **SMALL_GROUPS},
        traits=RESUMES | SHARDED,
    ),
    "zero3 hpz": Strategy(
        use="wrap.zero",
        fields={"stage": 3, "plus_plus": {"secondary_partition": 2}},
        traits=RESUMES,
        group=2,
    ),
    "zero2 offload": Strategy(
        use="wrap.zero", fields={"stage": 2, "offload_optimizer": {}}, traits=RESUMES | SHARDED
    ),
    "zero3 offload": Strategy(
        use="wrap.zero",
        fields={"stage": 3, "offload_optimizer": {}, "offload_param": {}},
        traits=RESUMES,
    ),
    "zero3 optimizer offload": Strategy(
        use="wrap.zero", fields={"stage": 3, "offload_optimizer": {"device": "cpu"}}, parity=(1, 2)
    ),
    "accelerate ddp": Strategy(
        use="wrap.accelerate",
        fields={
            "accelerate": "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: -1\n",
        },
        parity=(2, 3),
    ),
    "accelerate fsdp2": Strategy(
        use="wrap.accelerate",
        fields={"accelerate": ACCELERATE_FSDP},
        parity=(2,),
        batching=UNEVEN,
    ),
    "accelerate fsdp2 from rank 0": Strategy(
        use="wrap.accelerate",
        fields={"accelerate": ACCELERATE_FSDP.replace("loading: false", "loading: true")},
        parity=(2,),
    ),
}


def having(trait: Trait) -> dict[str, Strategy]:
    found = {name: one for name, one in STRATEGIES.items() if trait in one.traits}
    # Groups of four take the quick tier's two cores too long.
    return {name: one for name, one in found.items() if FULL or one.group <= 2}
