"""Every strategy and axis, with the models that they treat differently, against a plain loop: the
same losses, gradient norms and final weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.distributed.process_group import DistContext
from stages.model.declared import outline
from stages.model.hf import ActivationCheckpointing, Compile
from tests.parity.body import SEED, STEPS, Case, source_of, tiny_source, train_case
from tests.parity.reference import assert_same_numbers, plain_loop, steps_of
from tests.support.moe import MOE, attention_of
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context
from tests.support.strategies import STRATEGIES, having
from tests.support.tensor import FAMILIES, GPT2_PLAN, sized
from tests.support.tier import FULL, spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

Find = Callable[[str], Any]
QLORA = {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "up_proj", "down_proj"), "quantize": "nf4"}
LORA = {"rank": 4, "alpha": 8.0}
UNTIED = {"tie_word_embeddings": False}
RECOMPUTED = {"activation_checkpointing": ActivationCheckpointing()}
BASIC, HALVED = having("basic"), having("half")


def axis(name: str, size: int = 2, **fields: Any) -> dict[str, Any]:
    return {f"{name}_parallel": {"size": size, **fields}}


def quick(cases: Mapping[str, Case], keep: int) -> dict[str, Case]:
    """Return the part of some cases that the quick tier trains."""
    return {name: cases[name] for name in spread(list(cases), keep)}


def of(name: str, **more: Any) -> Case:
    """Return a case of a strategy."""
    one = STRATEGIES[name]
    return Case(**{"wrap": one.use, "fields": one.fields, "loop": one.batching, **more})


# Every strategy.
ON_ONE = {"fsdp full", "zero3"}
WHOLE = {
    f"{name} on {ranks}": of(name, ranks=ranks)
    for name, one in STRATEGIES.items()
    for ranks in (one.parity if FULL else {*one.parity[-1:], *((1,) if name in ON_ONE else ())})
}

# The embedding and the head in FSDP units of their own.
CHUNKS = {"loss_chunk_size": 5}
UNITS = {
    f"units {name}": Case(
        ranks=ranks, fields=fields, model=UNTIED, loop={"micro_batch_size": size, **loop}
    )
    for name, ranks, size, fields, loop in (
        ("in chunks", 2, 2, {}, CHUNKS),
        ("reduced once, in chunks", 2, 2, {"reduce_every_microbatch": False}, CHUNKS),
        ("all logits", 3, 3, {}, {}),
        ("grad op", 2, 2, {"sharding": "shard_grad_op"}, {}),
        ("hybrid", 4, 1, {"sharding": "hybrid_shard", "shard_size": 2}, {}),
        ("ahead", 2, 2, {"forward_prefetch": 1, "backward_prefetch": 2}, {}),
        ("offload", 2, 2, {"cpu_offload": True}, CHUNKS),
        ("alone", 1, 2, {}, {}),
    )
}

# Families that attend differently, with every sample's tokens divided among ranks.
WINDOW = {"sliding_window": 5}
ATTENDING = {
    "one key head": sized("llama", num_key_value_heads=1),
    "qwen3": sized("qwen3", num_key_value_heads=2),
    "window": sized("mistral", **WINDOW),
    "window in every second block": sized(
        "gemma3_text", query_pre_attn_scalar=8, **WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
CONTEXT = {
    f"context {model} on {ranks}": Case(
        ranks=ranks, fields=axis("context", ranks), model=ATTENDING[model],
        hf={"attention": attention}, packed=packed,
    )
    for model, ranks, attention, packed in (
        ("one key head", 4, "sdpa", False),
        ("one key head", 2, "eager", True),
        ("qwen3", 2, "sdpa", True),
        ("window", 2, "sdpa", False),
        ("window", 4, "eager", True),
        ("window in every second block", 2, "sdpa", True),
        ("window in every second block", 4, "sdpa", False),
    )
}  # fmt: skip


# Families that tensor parallelism divides differently; activations are divided along the sequence,
# or not.
def divided(model: Mapping[str, Any], *, sequence: bool, ranks: int = 2, **hf: Any) -> Case:
    kind = model["model_type"]
    plan = GPT2_PLAN if kind == "gpt2" else {}
    eager = {"attention": "eager"} if kind == "gemma2" else {}
    fields = axis("tensor", ranks, sequence=sequence, plan=plan)
    return Case(ranks=ranks, fields=fields, model=model, hf={**eager, **hf})


COMPILED = {"compile": Compile(backend="aot_eager"), **RECOMPUTED}
FEW_KEYS = sized("llama", num_key_value_heads=2)
TENSOR = {
    **{f"tensor {name}": divided(model, sequence=number % 2 == 0)
       for number, (name, model) in enumerate(FAMILIES.items())},
    **{f"tensor {name}, compiled": divided(FAMILIES[name], sequence=name != "gpt2", **COMPILED)
       for name in ("gpt2", "mixtral")},
    "tensor fewer key heads, compiled": divided(FEW_KEYS, sequence=True, ranks=4, **COMPILED),
    "tensor qwen3, compiled": divided(FAMILIES["qwen3"], sequence=True, **COMPILED),
    "tensor qwen3, whole sequences": divided(FAMILIES["qwen3"], sequence=False),
    "tensor fewer key heads than ranks": divided(FEW_KEYS, sequence=True, ranks=4),
    "tensor gpt2, whole sequences": divided(FAMILIES["gpt2"], sequence=False),
}  # fmt: skip

# Pipelines under every schedule of torch.
DEEP = {"num_hidden_layers": 8, **UNTIED}
GATHERED = {"sharding": "shard_grad_op"}
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
)  # fmt: skip


def staged(schedule: str, ranks: int = 2, **more: Any) -> Case:
    fields = {**axis("pipeline", ranks, schedule=schedule), **GATHERED}
    return Case(ranks=ranks, fields=fields, model=DEEP, **more)


PIPELINES = {
    **{f"{name} on {ranks}": staged(name, ranks) for ranks in (2, 4) for name in SCHEDULES},
    "1F1B recomputed": staged("1F1B", hf=RECOMPUTED),
    "ZBVZeroBubble recomputed twice": staged("ZBVZeroBubble", hf=RECOMPUTED),
    "Interleaved1F1B packed": staged("Interleaved1F1B", packed=True),
    "1F1B in chunks": staged("1F1B", loop={"micro_batch_size": 2, "loss_chunk_size": 3}),
    "1F1B lora": staged("1F1B", lora=LORA),
}

# Mixtures of experts under every strategy, and their experts divided among ranks. Some experts get
# no token in a micro-batch: their part of the stacked weights has gradients of zero.


def mixture(kind: str, *, adapted: bool, **more: Any) -> Case:
    hf = {"attention": attention_of(MOE[kind]), **(RECOMPUTED if adapted else {})}
    return Case(model=MOE[kind], hf=hf, lora=LORA if adapted else None, **more)


MIXTURES = {
    f"{kind} {'lora' if adapted else 'whole'}, experts under {name}": mixture(
        kind, adapted=adapted, wrap=one.use, fields=one.fields
    )
    for name, one in BASIC.items()
    if FULL or name not in ("zero1", "zero2")
    for kind in spread(list(MOE), 1)
    for adapted in (False, True)
}
EXPERTS = {
    f"experts {name}": mixture(
        "olmoe", adapted=name == "lora", ranks=ranks, fields={**axis("expert"), **fields}
    )
    for name, ranks, fields in (
        ("whole", 2, {}),
        ("lora", 2, {}),
        ("in two shards", 4, {}),
        ("in two replicas", 4, {"sharding": "hybrid_shard", "shard_size": 2}),
        ("with context", 4, axis("context")),
        ("in a pipeline", 4, axis("pipeline")),
    )
}

# Rotary angles that depend on how long a text is.
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 6,
    "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 8.0],
}  # fmt: skip
ROTATING = {
    "longrope": sized(
        "phi3", rope_parameters=LONG, max_position_embeddings=24,
        original_max_position_embeddings=6,
    ),
    "dynamic": sized(
        "llama", max_position_embeddings=6,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}  # fmt: skip
ROTARY = {
    f"{model} {layout}{', packed' * packed}": Case(
        ranks=ranks, wrap=wrap, fields=fields, model=ROTATING[model], packed=packed,
        loop={"micro_batch_size": 4 if ranks == 1 else 2},
    )
    for packed in (False, True)
    for layout, ranks, wrap, fields in (
        ("ddp", 1, "wrap.ddp", {}),
        ("context", 2, "wrap.fsdp", axis("context")),
        ("pipeline", 2, "wrap.fsdp", axis("pipeline")),
        ("tensor", 2, "wrap.fsdp", axis("tensor")),
        ("context and tensor", 4, "wrap.fsdp", {**axis("context"), **axis("tensor")}),
        ("zero", 2, "wrap.zero", {"stage": 3}),
    )
    for model in ROTATING
}  # fmt: skip

# Parameters that patterns freeze.
STAGED = {**axis("pipeline"), **GATHERED}
FROZEN = {
    f"frozen {name}": Case(
        ranks=ranks, wrap=wrap, fields=fields, model=UNTIED,
        hf={"frozen": ("model.embed_tokens.*", "model.layers.0.*", "model.layers.2.mlp.*")},
    )
    for name, ranks, wrap, fields in (
        ("ddp", 2, "wrap.ddp", {}),
        ("fsdp", 2, "wrap.fsdp", {}),
        ("tensor", 2, "wrap.fsdp", axis("tensor")),
        ("zero3", 2, "wrap.zero", {"stage": 3}),
        ("pipeline", 2, "wrap.fsdp", STAGED),
        ("zero2", 2, "wrap.zero", {"stage": 2}),
        ("fsdp x tensor", 4, "wrap.fsdp", axis("tensor")),
    )
    if FULL or name not in ("zero2", "fsdp x tensor")
}  # fmt: skip

# Models of more than text, trained on text: nothing else is held.
MULTIMODAL = {
    f"{kind} {layout}": Case(wrap=wrap, fields=fields, saved=kind, packed=packed)
    for kind, layout, wrap, fields, packed in (
        ("gemma3", "ddp", "wrap.ddp", {}, False),
        ("gemma3", "fsdp", "wrap.fsdp", {}, True),
        ("qwen3_5", "ddp", "wrap.ddp", {}, False),
        ("qwen2_5_vl", "context", "wrap.fsdp", axis("context"), True),
        ("qwen2_5_vl", "tensor", "wrap.fsdp", axis("tensor"), False),
        ("mllama", "ddp", "wrap.ddp", {}, False),
        ("llava", "zero3", "wrap.zero", {"stage": 3}, True),
    )
}
TOWERS = {
    f"{name} with a frozen tower": Case(
        wrap=wrap, fields=fields, saved="gemma3", towers=True,
        hf={"frozen": ("model.vision_tower.*", "model.multi_modal_projector.*")},
    )
    for name, wrap, fields in (
        ("fsdp", "wrap.fsdp", {}), ("ddp", "wrap.ddp", {}), ("zero3", "wrap.zero", {"stage": 3}),
    )
    if FULL or name == "fsdp"
}  # fmt: skip

EXACT = {
    **WHOLE, **quick(UNITS, 3), **quick(CONTEXT, 2), **quick(TENSOR, 2), **quick(PIPELINES, 4),
    **MIXTURES, **quick(EXPERTS, 2), **quick(ROTARY, 5), **FROZEN, **quick(MULTIMODAL, 4), **TOWERS,
}  # fmt: skip
HALF = {
    **{f"{name} in {compute}": of(name, compute=compute, loop={"micro_batch_size": 2})
       for name in HALVED for compute in ("bf16", "fp16")
       if FULL or (name, compute) != ("zero2", "fp16")},
    **{f"{name} on 4 bits": of(name, compute="bf16", lora=QLORA, loop={"micro_batch_size": 3})
       for name in BASIC if FULL or name not in ("zero1", "zero2")},
}  # fmt: skip
MASTERS = {
    f"{name} with masters in bf16": of(
        name, compute="bf16", master="bf16", loop={"micro_batch_size": 2}
    )
    for name in HALVED
    if name != "zero1" and (FULL or name != "zero2")
}
HALVES = {
    f"sums of {schedule}": staged(schedule, compute="bf16", loop={"micro_batch_size": 1})
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
}
CASES = EXACT | HALF | MASTERS | HALVES


@pytest.mark.parametrize("name", EXACT)
def test_the_numbers_of_a_plain_loop(name: str, trained: Find) -> None:
    case, result, expected = CASES[name], trained(name), plain_loop(CASES[name])
    assert_same_numbers(result, expected)
    held = load_file(f"{result['folder']}/final.safetensors").keys()
    assert not any("visual" in key or "vision" in key for key in held)
    if "experts" in name:
        assert sum("experts" in key for key in expected[2]) >= 2
    if name in UNITS:
        assert result["facts"]["units"] == 6
    if name in FROZEN:
        assert held == expected[2].keys()
        assert len(held) == 30 - (1 + 9 + 3)
        assert "model.layers.2.self_attn.q_proj.weight" in held
        if case.fields != STAGED:  # each of its ranks counts its own
            count = sum(weight.numel() for weight in expected[2].values())
            assert result["facts"]["trained_parameters"] == count


@pytest.mark.parametrize("name", TOWERS)
def test_a_frozen_tower_is_counted_and_not_trained(name: str, trained: Find) -> None:
    """FSDP shards it with the text."""
    result, case = trained(name), CASES[name]
    ctx = context(DistContext(device=torch.device("cpu")), result["folder"], SEED)
    text = source_of(ctx, replace(case, hf={}, towers=False))
    held = load_file(f"{result['folder']}/final.safetensors")
    assert held.keys() <= {*text.weights().names()}
    every, own = (
        sum(one.numel() for one in outline(source).parameters())
        for source in (source_of(ctx, case), text)
    )
    facts = result["facts"]
    assert (facts["parameters"], facts["trained_parameters"]) == (every, own)
    if name.startswith("fsdp"):  # the tower's block, those of text, and the root with the embedding
        assert facts["units"] == 1 + 2 + 1


@pytest.mark.parametrize("name", HALF)
def test_a_precision_policy_means_the_same_under_every_strategy(name: str, trained: Find) -> None:
    """Autocast under one strategy and cast parameters under another would differ by 10 %. In 4
    bits, strategies hold, shard and gather bytes as another dtype."""
    case, result = CASES[name], trained(name)
    losses, norms, *_ = plain_loop(case)
    assert all(steps_of(result, "applied"))
    assert steps_of(result, "loss") == pytest.approx(losses, rel=3e-4)
    assert steps_of(result, "grad_norm") == pytest.approx(norms, rel=3e-3)
    if case.lora:
        ctx = context(DistContext(device=torch.device("cpu")), result["folder"], SEED)
        whole = tiny_source(ctx, {**QLORA, "quantize": None}).build()
        count = sum(parameter.numel() for parameter in whole.parameters())
        assert result["facts"]["parameters"] == count


@pytest.mark.parametrize("name", MASTERS)
def test_bf16_master_weights_follow_the_plain_loop_as_far_as_they_can(
    name: str, trained: Find
) -> None:
    losses, norms, *_ = plain_loop(CASES[name])
    result = trained(name)
    assert result["facts"]["master"] == ["bf16"]
    assert steps_of(result, "loss") == pytest.approx(losses, rel=3e-3)
    assert steps_of(result, "grad_norm") == pytest.approx(norms, rel=2e-2)
    # the norm is accumulated in fp32: bf16 has 8 bits, so few norms would be a multiple otherwise
    assert any(math.remainder(norm, 2**-8) for norm in steps_of(result, "grad_norm"))


@pytest.mark.parametrize("name", HALVES)
def test_the_halves_of_backward_sum_gradients_in_fp32(name: str, trained: Find) -> None:
    """FSDP does not see the half for weights; its sums would be those of bf16."""
    norms, whole = (steps_of(trained(one), "grad_norm") for one in (name, next(iter(HALVES))))
    assert len(norms) == STEPS
    assert norms == pytest.approx(whole, rel=1e-5)


def test_a_first_stage_without_trained_weights_is_refused(tmp_path: Path) -> None:
    frozen = {"frozen": ("model.embed_tokens.*", "model.layers.[01].*")}
    case = Case(fields=STAGED, hf=frozen, model=UNTIED)
    with pytest.raises(RankFailed, match="none of the trained weights are in this rank's blocks"):
        run_ranks(train_case, 2, str(tmp_path), case)


def test_an_expert_without_tokens_has_gradients_of_zero(tmp_path: Path) -> None:
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path, SEED)
    source = tiny_source(ctx, **MOE["qwen3_moe"])
    model, reader = source.build(), source.weights()
    model.load_state_dict({name: reader.read(name) for name in reader.names()}, strict=False)
    model(input_ids=torch.tensor([[5, 17]])).logits.square().sum().backward()
    for block in model.model.layers:
        grad = block.mlp.experts.gate_up_proj.grad
        assert 2 <= int((grad.abs().sum(dim=(1, 2)) > 0).sum()) <= 4
