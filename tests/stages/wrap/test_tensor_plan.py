"""Plans of tensor parallelism are resolved and refused on the meta device, without processes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import StageError
from stages.wrap.axes import TensorParallel
from stages.wrap.tensor_plan import TensorPlan, matches
from tests.support.tensor import GPT2, sized

GQA = sized("llama", num_key_value_heads=2)
TIED = sized("llama", tie_word_embeddings=True)
MIXTRAL = sized("mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=63)


def plan_of(
    config: dict[str, Any],
    size: int = 2,
    patterns: Any = MappingProxyType({}),
    *,
    sequence: bool = False,
) -> TensorPlan:
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    base = model.base_model
    blocks = list(base.h if config["model_type"] == "gpt2" else base.layers)
    return TensorPlan(TensorParallel(size=size, plan=patterns, sequence=sequence), model, blocks)


def test_an_architecture_is_divided_by_its_own_plan() -> None:
    plan = plan_of(sized("llama"))
    assert plan.placements["model.layers.1.self_attn.q_proj.weight"] == Shard(0)
    assert plan.placements["model.layers.1.self_attn.o_proj.weight"] == Shard(1)
    assert plan.placements["lm_head.weight"] == Shard(0)
    assert plan.placements["model.norm.weight"].is_replicate()
    assert plan.head == "lm_head"
    assert not plan.summed
    assert all(region.plain for region in plan.regions)


def test_gradients_of_norms_on_parts_of_the_sequence_are_summed() -> None:
    plan = plan_of(sized("qwen3"), sequence=True)
    found = {name.removeprefix("model.layers.0.") for name in plan.summed if ".0." in name}
    assert found == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "size", "patterns", "said"),
    [
        (GPT2, 2, {}, "brings no plan"),
        (sized("llama"), 2, {"model.layers.*.mlp.up_proj": "columns"}, "unknown style 'columns'"),
        (sized("llama"), 2, {"model.layers.*.mlp.upproj": "colwise"}, "matches no module"),
        (
            sized("llama"), 2, {"model.layers.*.mlp.down_proj": "replicate"},
            "nothing in model.layers.0.mlp is rowwise",
        ),
        (sized("llama"), 3, {}, "4 attention heads do not divide among 3"),
        (sized("llama"), 2, {"model.norm": "colwise"}, "for linear layers, this is a LlamaRMSNorm"),
        (TIED, 2, {"model.embed_tokens": "replicate"}, "tied weights would be placed differently"),
        (MIXTRAL, 2, {}, "do not divide into"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(config: Any, size: int, patterns: Any, said: str) -> None:
    with pytest.raises(StageError, match=said):
        plan_of(config, size, patterns)


def test_fewer_key_heads_than_ranks_are_shared() -> None:
    plan = plan_of(GQA, 4)
    assert set(plan.shared_heads.values()) == {2}
    assert plan.placements["model.layers.0.self_attn.k_proj.weight"].is_replicate()
    assert "model.layers.0.self_attn.k_proj.weight" in plan.summed


def test_a_star_stands_for_one_part_of_a_name() -> None:
    assert matches("model.layers.*.mlp", "model.layers.11.mlp")
    assert not matches("model.*.mlp", "model.layers.11.mlp")
    assert not matches("model.layers.*.mlp", "model.layers.1.mlp.up_proj")
