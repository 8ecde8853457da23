"""Combinations of every feature with every strategy, as recipes and as test cases.

`python -m tests.parity.combinations` prints a part of docs/strategies.md: the answers of `pipe
check`. `test_combinations.py` trains the accepted combinations.
"""

from __future__ import annotations

import functools
import json
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.chain.plan import plan_file
from pipeline.errors import RecipeError
from stages.model.hf import ActivationCheckpointing, Compile, Fp8
from tests.parity.body import Case
from tests.support.strategies import Strategy, having

RANKS, MICRO = 2, 3
STRATEGIES = {one.title: one for one in having("combines").values()}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Fields of the recipe's slots, by slot."""

    adapter: Mapping[str, Any] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    rounds: bool = False
    """Whether the feature changes the model's numbers, so that the plain loop needs it too."""


LORA = {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "up_proj", "down_proj")}
BLOCKS: dict[str, Any] = {"backend": "aot_eager"}  # traced like any other backend, and quick
CHUNK = {"loss_chunk_size": 7}
FEATURES = {
    "packing": Feature(packed=True),
    "loss in chunks": Feature(train=CHUNK),
    "activation checkpointing": Feature(model={"activation_checkpointing": {}}),
    "- every second block, offloaded": Feature(
        model={"activation_checkpointing": {"every": 2, "offload": True}}
    ),
    "- keeping attention": Feature(model={"activation_checkpointing": {"keep": "attention"}}),
    "- keeping matrix products": Feature(model={"activation_checkpointing": {"keep": "matmuls"}}),
    "compiled blocks": Feature(model={"compile": BLOCKS}),
    "8-bit products (emulated)": Feature(model={"fp8": {"emulate": True}}, rounds=True),
    "LoRA": Feature(adapter=LORA),
    "DoRA": Feature(adapter={**LORA, "dora": True}),
    "QLoRA": Feature(adapter={**LORA, "quantize": "nf4"}),
    "DoRA, checkpointing": Feature(
        adapter={**LORA, "dora": True}, model={"activation_checkpointing": {}}
    ),
    "QLoRA, DoRA, checkpointing, compiled": Feature(
        adapter={**LORA, "quantize": "nf4", "dora": True},
        model={"activation_checkpointing": {}, "compile": BLOCKS},
    ),
    "LoRA, packing, checkpointing, chunks": Feature(
        adapter=LORA, packed=True, train=CHUNK, model={"activation_checkpointing": {}}
    ),
    "packing, checkpointing, compiled, chunks": Feature(
        packed=True, train=CHUNK, model={"activation_checkpointing": {}, "compile": BLOCKS}
    ),
}
CONTAINED = {
    "packing", "loss in chunks", "activation checkpointing", "compiled blocks", "LoRA", "DoRA",
}  # fmt: skip
"""Features that are also part of the combined ones above."""


def recipe(feature: Feature, strategy: Strategy) -> dict[str, Any]:
    """Return the combination as a recipe of two processes."""
    adapter = {"adapter": {"use": "adapter.lora", **feature.adapter}} if feature.adapter else {}
    tiny = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4}
    packing = {"packing": True} if feature.packed else {}
    return {
        "name": "combination",
        "launch": {"procs": RANKS, "device": "cpu"},
        "stages": {
            "model": {"use": "model.hf", "config": tiny, **feature.model},
            **adapter,
            "precision": {"use": "precision.policy", "compute": "fp32"},
            "data": {"use": "data.chat", "files": "./rows.jsonl", **packing},
            "optimizer": {"use": "optimizer.adamw"},
            "wrap": {"use": strategy.use, **strategy.fields},
            "checkpoint": {"use": "checkpoint.sharded"},
            "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 2,
                      **feature.train},
        },
    }  # fmt: skip


@functools.cache
def refusal(feature: str, strategy: str) -> str:
    """Return the reason why `pipe check` refuses the combination; empty if it accepts."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text("")
        file = Path(folder) / "recipe.yaml"
        file.write_text(json.dumps(recipe(FEATURES[feature], STRATEGIES[strategy])))
        try:
            plan_file(file, forecast=True)  # the model has no tokenizer
        except RecipeError as error:
            return "; ".join(problem.message for problem in error.problems)
    return ""


SIZES = {"hidden_size": 32, "intermediate_size": 48}
"""Sizes of the model, multiples of 16 as 8-bit products need."""


KINDS = {"activation_checkpointing": ActivationCheckpointing, "compile": Compile, "fp8": Fp8}


def case(feature: Feature, strategy: Strategy) -> Case:
    return Case(
        ranks=RANKS, wrap=strategy.use, fields=strategy.fields, model=SIZES, lora=feature.adapter,
        hf={name: KINDS[name](**value) for name, value in feature.model.items()},
        loop={"micro_batch_size": MICRO, **feature.train}, packed=feature.packed,
    )  # fmt: skip


def table() -> str:
    """Return what stands between the marks `combinations` of docs/strategies.md."""
    refused: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name in FEATURES:
        reasons = {title: reason for title in STRATEGIES if (reason := refusal(name, title))}
        if reasons:
            per_reason = refused.setdefault(tuple(reasons), {})
            per_reason.setdefault("; ".join(dict.fromkeys(reasons.values())), []).append(name)
    rows = [
        f"| {'; '.join(map(shown, names))} | {'; '.join(titles)} | {why} |"
        for titles, per_reason in refused.items()
        for why, names in per_reason.items()
    ]
    return TEMPLATE.format(
        features=listed("Features", map(shown, FEATURES)),
        strategies=listed("Strategies, on two processes", STRATEGIES),
        rows="\n".join(rows),
    )


def shown(feature: str) -> str:
    """Return a feature's name as the page has it."""
    plain = feature.removeprefix("- ")
    return feature.replace(", ", " + ") if plain == feature else f"checkpointing, {plain}"


def listed(title: str, names: Iterable[str]) -> str:
    """Return an item of a list, in lines of the page's width."""
    return textwrap.fill(f"- {title}: {'; '.join(names)}.", 118, subsequent_indent="  ")


TEMPLATE = """
{features}
{strategies}

`pipe check` refuses the exceptions:

| feature | refused under | why |
|---|---|---|
{rows}

"""

if __name__ == "__main__":
    print(table(), end="")
