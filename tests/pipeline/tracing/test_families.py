"""Arithmetic says of each family what a trace says, in every phase."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline.forecast.phases import BACKWARD, FORWARD, UPDATE
from pipeline.tracing.level import traced_forecast

from tests.support.families import SIZES, SMALL, VARIANTS, fields
from tests.support.tier import spread

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CASES: dict[str, dict[str, Any]] = {
    "DDP": {"wrap": "ddp", "samples": 2},
    "FSDP again": {"ranks": 4, "again": True, "accumulation": 2},
    "FSDP packed, LoRA": {"ranks": 2, "packed": True, "adapter": {"rank": 4}},
    "DDP again, fp32, LoRA": {
        "wrap": "ddp", "again": True, "compute": "fp32", "adapter": {"rank": 4},
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    """Its modules, which are no part of any package, can be imported."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def apart(
    model: dict[str, Any],
    folder: Path,
    *,
    again: bool = False,
    device: str = "cuda",
    **more: Any,
) -> float:
    """The largest relative difference of a phase's peak."""
    from memories.cases import Case

    model = model | ({"activation_checkpointing": {}} if again else {})
    case = Case(name="", model=model, length=96, **more)
    traced = traced_forecast(case.plan(folder, device=device), case.site(device))
    assert traced.arithmetic is not None
    told, reference = traced.arithmetic.device, traced.forecast.device
    return max(abs(told[p].bytes / reference[p].bytes - 1) for p in (FORWARD, BACKWARD, UPDATE))


PAIRS = [
    (kind, list(CASES)[(place + turn) % len(CASES)])
    for place, kind in enumerate(SMALL)
    for turn in range(len(CASES))
]
"""Each family begins with another case, or the quick tier would meet the same two all the time."""


@pytest.mark.parametrize(("kind", "case"), spread(PAIRS, 8))
def test_a_family(kind: str, case: str, tmp_path: Path) -> None:
    assert apart(fields(kind), tmp_path, **CASES[case]) < 0.01


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant(variant: str, tmp_path: Path) -> None:
    assert apart(fields(variant), tmp_path, ranks=2, samples=2) < 0.01


@pytest.mark.parametrize("kind", spread(["llama", "phi3", "gemma3_text", "gpt_neox", "gpt2"], 1))
def test_attention_that_holds_its_matrix(kind: str, tmp_path: Path) -> None:
    config = SMALL[kind]["config"] if kind in SMALL else {"model_type": kind, **SIZES}
    model = {"config": config, "attention": "eager"}
    assert apart(model, tmp_path, wrap="ddp", samples=2) < 0.01


DROPPED = [
    ("gpt2", "resid_pdrop"),
    ("gpt2", "embd_pdrop"),
    ("gpt2", "attn_pdrop"),
    ("gpt_neox", "hidden_dropout"),
    ("granite", "attention_dropout"),
]


@pytest.mark.parametrize(
    ("kind", "field", "again"),
    spread([(*dropped, again) for dropped in DROPPED for again in (False, True)], 5),
)
def test_dropout(kind: str, field: str, again: bool, tmp_path: Path) -> None:
    """On CPUs, whose kernels are traced; those of GPUs keep smaller masks."""
    model = {"config": {**fields(kind)["config"], field: 0.1}}
    assert apart(model, tmp_path, wrap="ddp", samples=2, again=again, device="cpu") < 0.01
