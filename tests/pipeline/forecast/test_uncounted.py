"""A plan says which slots are not in it, and what slots take that train nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from pipeline.forecast.shapes import BlockShape
from pipeline.forecast.site import Site

from pipeline.artifacts import Data, ExportedModel, OptimizerPlan
from pipeline.cli import main
from pipeline.engine import Engine
from pipeline.registry import BUILT_IN, Entry, Registry
from pipeline.stage import Context

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "vocab_size": 1000,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip
BLOCK = 4 * 64 * 64 + 3 * 64 * 160 + 2 * 64
ROOT = 2 * 1000 * 64 + 64
RANK = 8
UPDATES = RANK * (4 * (64 + 64) + 3 * (64 + 160))
"""Elements of a block's updates."""
BUFFERS = 64 << 20
TEXT = Path(__file__).parents[3] / "recipes" / "data" / "persuasion.txt"


@dataclass(frozen=True, kw_only=True)
class Mute:
    """Say nothing of what it needs."""

    def run(self, ctx: Context, exported: ExportedModel) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Need what no slot tells."""

    def forecast(self, site: Site, block: BlockShape) -> None: ...

    def run(self, ctx: Context, exported: ExportedModel) -> None: ...


@dataclass(frozen=True, kw_only=True)
class MuteWrap:
    """A strategy that says nothing."""

    def run(self, ctx: Context) -> Engine: ...


@dataclass(frozen=True, kw_only=True)
class MuteData:
    """Samples of which nothing is said."""

    def run(self, ctx: Context) -> Data: ...


@dataclass(frozen=True, kw_only=True)
class MuteOptimizer:
    """A rule that says nothing."""

    def run(self, ctx: Context) -> OptimizerPlan: ...


@dataclass(frozen=True, kw_only=True)
class Harmless:
    """Something of which no other stage has to know."""

    def run(self, ctx: Context) -> None: ...


PLUGINS = {
    "plugin.mute": "Mute", "plugin.asking": "Asking", "plugin.harmless": "Harmless",
    "wrap.mute": "MuteWrap", "data.mute": "MuteData", "optimizer.mute": "MuteOptimizer",
}  # fmt: skip


def slots(**changed: Any) -> dict[str, Any]:
    return {
        "model": {"use": "model.hf", "config": LLAMA},
        "precision": {"use": "precision.policy"},
        "data": {"use": "data.text", "files": str(TEXT), "sequence_length": 64},
        "optimizer": {"use": "optimizer.adamw"},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 2},
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": "export.safetensors"},
    } | changed


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    def run(stages: dict[str, Any], *options: str, device: str = "cpu") -> Result:
        file = tmp_path / "recipe.yaml"
        recipe = {"name": "r", "launch": {"procs": 2, "device": device}, "stages": stages}
        file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
        more = [
            Entry(name=name, value=f"{__name__}:{kind}", distribution="plugins", version="1")
            for name, kind in PLUGINS.items()
        ]
        registry = Registry([*Registry.installed().entries(), *more])
        return CliRunner().invoke(main, ["plan", str(file), *options], obj=registry)

    return run


def told(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.output)
    return record


def test_a_slot_without_a_forecast_is_named(plan: Any) -> None:
    stages = slots(tell={"use": "plugin.mute"}, ask={"use": "plugin.asking"})
    uncounted = [
        "slot `tell` (plugin.mute) has no forecast",
        "slot `ask` (plugin.asking) needs what no slot before it tells: BlockShape",
    ]
    shown = plan(stages).output.splitlines()
    assert [line for line in shown if line.startswith("not counted")] == [
        f"not counted: {each}" for each in uncounted
    ]
    assert told(plan(stages, "--json"))["caveats"] == uncounted


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({**LLAMA, "max_position_embeddings": 63}, 63),
        ({**LLAMA, "max_position_embeddings": 64}, None),
        ({**LLAMA, "max_position_embeddings": "many"}, None),
        (LLAMA, None),
        # Scaled angles add positions, of which some configs count those that they had before.
        ({**LLAMA, "max_position_embeddings": 32, "rope_scaling": {"factor": 1.5}}, 48),
        ({**LLAMA, "max_position_embeddings": 32, "rope_scaling": {"factor": 2.0}}, None),
        (
            {
                **LLAMA,
                "max_position_embeddings": 32,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8},
            },
            32,
        ),
    ],
)
@pytest.mark.parametrize("adapter", [False, True])
def test_samples_that_are_longer_than_the_models_context_are_told(
    plan: Any, config: dict[str, Any], context: int | None, adapter: bool
) -> None:
    stages: dict[str, Any] = {"model": {"use": "model.hf", "config": config}}
    if adapter:
        stages["adapter"] = {"use": "adapter.lora", "rank": RANK}
    stages |= {slot: one for slot, one in slots().items() if slot != "model"}
    beyond = (
        f"what becomes of positions beyond the {context} of the model's config: samples have 64 "
        "tokens"
    )
    caveats = told(plan(stages, "--json"))["caveats"]
    assert caveats == ([] if context is None else [beyond])


def test_documents_that_are_packed_may_be_shorter(plan: Any) -> None:
    config = {**LLAMA, "max_position_embeddings": 63}
    data = {**slots()["data"], "documents_apart": True}
    stages = slots(model={"use": "model.hf", "config": config}, data=data)
    (caveat,) = told(plan(stages, "--json"))["caveats"]
    assert caveat.endswith("samples have 64 tokens (of documents that may be shorter)")


def test_what_cannot_be_told_is_not_blamed_on_what_comes_after_training(plan: Any) -> None:
    said = plan(slots(wrap={"use": "wrap.mute"}, tell={"use": "plugin.mute"}))
    assert said.exit_code == 2
    why = "without a forecast, which others build on"
    assert f"cannot be told: wrap: wrap.mute ({why})" in said.output


@pytest.mark.parametrize("slot", ["data", "optimizer"])
def test_the_slot_that_others_build_on_is_named_and_no_harmless_one(plan: Any, slot: str) -> None:
    """A slot before training, of which nothing else has to know, is not to blame."""
    said = plan({"before": {"use": "plugin.harmless"}} | slots(**{slot: {"use": f"{slot}.mute"}}))
    assert said.exit_code == 2
    assert f"cannot be told: {slot}: {slot}.mute (" in said.output


def test_what_trains_nothing_says_so(plan: Any, tmp_path: Path) -> None:
    stages = slots(train={"use": "train.finished", "checkpoint": str(tmp_path)})
    del stages["wrap"], stages["optimizer"], stages["checkpoint"]
    said = plan(stages)
    assert said.exit_code == 2
    assert "nothing is trained (give it a train slot)" in said.output


def test_every_stage_of_ours_has_a_forecast() -> None:
    registry = Registry.installed()
    ours = [one.name for one in registry.entries() if one.distribution == BUILT_IN]
    assert len(ours) > 20
    assert [name for name in ours if not hasattr(registry.load(name), "forecast")] == []


def test_what_comes_after_training(plan: Any) -> None:
    stages = slots(
        evaluate={"use": "evaluate.lm", "files": str(TEXT), "window": 32, "batch_size": 3},
        publish={"use": "publish.hub", "repo": "a/b", "dry_run": True},
    )
    record = told(plan(stages, "--json"))
    assert record["caveats"] == []
    assert record["host"]["evaluation"]["items"] == {
        "processes": 2 * round(0.6 * (1 << 30)),
        "exported model": 2 * (ROOT + 3 * BLOCK),
        "logits of an evaluation": 3 * 32 * 1000 * 3 * 4,
    }
    (caveat,) = told(plan(stages, "--json", device="cuda"))["caveats"]
    assert caveat == "the exported model on GPUs and their host while it is evaluated"


def test_an_adapter_that_is_exported_alone(plan: Any) -> None:
    stages = {"model": {"use": "model.hf", "config": LLAMA}}
    stages["adapter"] = {"use": "adapter.lora", "rank": RANK}
    stages |= slots(
        export={"use": "export.adapter", "dtype": "bf16"},
        evaluate={"use": "evaluate.lm", "files": str(TEXT)},
    )
    record = told(plan(stages, "--json"))
    assert record["caveats"] == []
    (export,) = (file for file in record["storage"] if file["what"] == "export")
    assert export["bytes"] == 2 * 3 * UPDATES
    proof = record["host"]["export"]["items"]["proof of the export"]
    assert proof == 4 * (ROOT + BLOCK) + 2 * 3 * UPDATES + BUFFERS
    loaded = record["host"]["evaluation"]["items"]["exported model"]
    assert loaded == 4 * (ROOT + 3 * BLOCK) + 2 * 3 * UPDATES
