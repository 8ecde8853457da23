"""Every causal language model of transformers trains a step under every layout with the numbers of
one process, or `pipe check` refuses it with a sentence.

The quick tier has one or two types a layout; the full tier, all.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.model.declared import outline
from stages.model.hf import HfModel
from stages.model.source import open_source
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.wrap.axes import TensorParallel
from stages.wrap.context_compat import require_divisible
from stages.wrap.pipeline_split import keep_layers
from stages.wrap.tensor_plan import TensorPlan
from tests.support.batches import accumulated, evaluated, micro_batch
from tests.support.every_family import every, small
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.strategies import Strategy
from tests.support.tier import spread

UNBUILT = {
    "apertus", "bailing_hybrid", "blt", "cohere_compass_text", "dbrx", "dots3_note", "gemma3n_text",
    "gemma4_assistant", "gemma4_unified_assistant", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "kimi_linear", "lfm2_moe", "longcat_flash", "mamba2", "ministral",
    "moss_transcribe_diarize", "musicgen",
    "musicgen_melody", "openai-gpt", "phi4_multimodal", "qwen4_exp", "qwen4_exp_text", "zamba",
}  # fmt: skip
"""Types whose shrunk config cannot be built or filled with random weights, leaves experts without
tokens, or computes for minutes."""
RANDOM = {"phimoe"}
"""Types whose router draws random numbers, of which each stage of a pipeline and each part of a
sequence has a stream."""
ONLY_EAGER = {
    "big_bird", "bigbird_pegasus", "bloom", "codegen", "deepseek_v4", "falcon_mamba", "flint",
    "gemma2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa",
    "hy_v4", "inkling2_text", "mamba", "mimo_v2_flash", "mpt", "mvp", "rwkv", "trocr",
    "vaultgemma", "xglm", "xlstm",
}  # fmt: skip
"""Types without sdpa."""
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline": ("wrap.fsdp", {"pipeline_parallel": {"size": 2}}),
    "context": ("wrap.fsdp", {"context_parallel": {"size": 2}}),
    "tensor": ("wrap.fsdp", {"tensor_parallel": {"size": 2}}),
    "expert": ("wrap.fsdp", {"expert_parallel": {"size": 2}}),
    "ddp": ("wrap.ddp", {}),
    "fsdp": ("wrap.fsdp", {}),
    "zero2": ("wrap.zero", {"stage": 2}),
    "zero3": ("wrap.zero", {"stage": 3}),
    "zero3, tensor": (
        "wrap.zero",
        {"stage": 3, "param_persistence_threshold": 100, "tensor_parallel": {"size": 2}},
    ),
}
ALONE = ("wrap.ddp", {"static_graph": True})
ROWS, LENGTH = 2, 16


def fields(kind: str) -> dict[str, Any]:
    """Return the fields of model.hf for a small model without dropout."""
    attention = "eager" if kind in ONLY_EAGER else "sdpa"
    return {"config": small(kind, dropout=False), "attention": attention}


def refusals(model: dict[str, Any], use: str, wrap: dict[str, Any]) -> list[str]:
    """Return what `pipe check` says against a model under a layout."""
    stage = Strategy(use=use, fields=wrap).stage()
    slots = {"model": HfModel(**model), "wrap": stage}
    plan = plan_view(slots, procs=2)
    return [str(one) for slot in slots.values() for one in slot.check(plan) if not one.warning]


@functools.cache
def known() -> list[str]:
    """Return the types that can be trained on one process."""
    found = [kind for kind in every() if kind not in UNBUILT]
    return [kind for kind in found if not refusals(fields(kind), *ALONE)]


def one_steps(
    dist: DistContext, folder: str, cases: list[tuple[str, str, dict[str, Any]]]
) -> list[list[float]]:
    """Train each type under its wrap stage for a step of two rows; return for each the mean loss
    before and after the step, and the gradient norm."""
    ctx, found = context(dist, folder), []
    for kind, use, wrap in cases:
        precision = PrecisionPolicy(compute="fp32", reduce="fp32").run(ctx)
        plan, source = AdamW(lr=1e-3, max_grad_norm=None).run(ctx), HfModel(**fields(kind)).run(ctx)
        engine = Strategy(use=use, fields=wrap).stage().run(ctx, source, precision, plan)
        axis = engine.data_axis
        rows = [(torch.arange(LENGTH + 1)[None] * 37 + 11 * n) % 900 + 50 for n in range(ROWS)]
        batches = [micro_batch(row[:, :-1], row[:, 1:].contiguous()) for row in rows]
        own = batches[axis.index :: axis.count]
        torch.manual_seed(0)  # otherwise a router draws what cases before it left
        before = engine.total(accumulated(engine, own, ROWS * LENGTH))
        report = engine.step(lr_scales=[1.0])
        after = engine.total(evaluated(engine, own))
        engine.close()
        losses = [float(one) / (ROWS * LENGTH) for one in (before, after)]
        found.append([*losses, float(report.grad_norm)])
    return found


def require_numbers(pairs: list[tuple[str, str]]) -> None:
    """Require the numbers of one process for each layout and type, all in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        every_rank = run_ranks(one_steps, 2, folder, [(k, *LAYOUTS[one]) for one, k in pairs])
        kinds = list(dict.fromkeys(kind for _, kind in pairs))
        (alone,) = run_ranks(one_steps, 1, folder, [(kind, *ALONE) for kind in kinds])
    for (layout, kind), found in zip(pairs, every_rank[0], strict=True):
        expected = alone[kinds.index(kind)]
        if layout not in ("pipeline", "context") or kind not in RANDOM:
            assert found[:2] == pytest.approx(expected[:2], rel=1e-5), (layout, kind)
            assert found[2] == pytest.approx(expected[2], rel=1e-4), (layout, kind)


@pytest.mark.filterwarnings("ignore")
def test_the_numbers_of_one_process() -> None:
    pairs = [
        ("pipeline", "gpt2"), ("pipeline", "falcon"), ("tensor", "qwen3_next"),
        ("context", "gemma3_text"), ("expert", "mixtral"), ("zero3", "gptj"),
        ("zero3, tensor", "qwen3"),
    ]  # fmt: skip
    assert [refusals(fields(kind), *LAYOUTS[layout]) for layout, kind in pairs] == [[]] * len(pairs)
    require_numbers(pairs)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in every() if kind not in UNBUILT])
def test_the_numbers_of_one_process_for_every_type(kind: str) -> None:
    if kind not in known():
        pytest.skip("is refused without any axis")
    layouts = [name for name, wrap in LAYOUTS.items() if not refusals(fields(kind), *wrap)]
    require_numbers([(layout, kind) for layout in layouts])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", spread([kind for kind in every() if kind not in UNBUILT], 12))
def test_check_refuses_what_would_be_refused_later(kind: str, tmp_path: Path) -> None:
    if kind not in known():
        pytest.skip("is refused without any axis")
    model = fields(kind)
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path)
    source = open_source(HfModel(**model), ctx)
    module: Any = outline(source)

    def divide() -> None:
        TensorPlan(TensorParallel(size=2), module, source.blocks(module))

    tries = {
        "tensor": divide,
        "context": lambda: require_divisible(module, 2, 1),
        "pipeline": lambda: keep_layers(module, range(2, 4)),
    }
    for layout, attempt in tries.items():
        said = [one for one in refusals(model, *LAYOUTS[layout]) if one.startswith(layout)]
        if said:
            with pytest.raises(StageError):
                attempt()
        else:
            attempt()


def test_a_replica_without_some_gradients_is_not_updated(tmp_path: Path) -> None:
    """torch says so in the next forward, after a wrong update."""
    (said,) = refusals(fields("bart"), "wrap.ddp", {})
    assert "some parameters of a bart get no gradient from text" in said
    with pytest.raises(AssertionError, match="40 parameters got no gradient"):
        run_ranks(one_steps, 2, str(tmp_path), [("bart", "wrap.ddp", {})])
