"""The block `model` of a torchtune recipe: the builder of a model, with or without LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.report import Report
from stages.importing.rules import RuleResult, Table, refused, sets, when_on
from stages.importing.tools import COMPONENT
from stages.importing.torchtune.rows import strict
from stages.importing.trainer import SCRIPT

PACKAGE = "torchtune.models."
FAMILIES = ("code_llama2", "gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2",
            "llama3_3", "mistral", "phi3", "phi4", "qwen2", "qwen2_5", "qwen3")  # fmt: skip
FUSED = ("phi3", "phi4")
"""Families whose projections are one layer in the layout of Hugging Face."""
PLAIN = ("gemma", "gemma2")
"""Families whose tokenizer puts nothing around messages."""
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""Layer in torchtune -> in the layout of Hugging Face."""
MLP = ("gate_proj", "up_proj", "down_proj")
DEFAULTS: Mapping[str, Any] = {"lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0}
"""Defaults of the builders that differ from the recipe's."""
TARGETS = "adapter.targets"


def family(name: Any) -> str:
    """Return the family in the name of a builder, empty if it is not torchtune's."""
    words = str(name).split(".")
    return words[2] if str(name).startswith(PACKAGE) and len(words) == 4 else ""


def read_model(report: Report, file: str, block: Mapping[str, Any]) -> None:
    """Read the block `model`."""
    name = str(block.get(COMPONENT, ""))
    builder = name.rpartition(".")[2]
    if builder.startswith("qlora_"):
        report.default("quantize", True, f"{builder} in {file}")
    fused = family(name) in FUSED
    report.read(file, block, strict(block, _table(fused=fused)), "model.")
    report.default("adapter", False, "the model's builder has no LoRA")
    if report.value("adapter"):
        for key, value in DEFAULTS.items():
            rule = _table(fused=fused)[key]
            assert callable(rule)
            found = rule(value)
            report.default(found.fact, found.content, "torchtune's default")
        _targets(report)


def _table(*, fused: bool) -> Table:
    why = "torchtune has parts of what is one layer in the layout of Hugging Face"
    divided = rules.unsupported(why, "set adapter.targets: qkv_proj, o_proj, gate_up_proj, ...")
    return {
        COMPONENT: _builder,
        "lora_attn_modules": divided if fused else sets("tune.attention", _attention),
        "apply_lora_to_mlp": divided if fused else sets("tune.mlp", rules.truth),
        "apply_lora_to_output": divided if fused else sets("tune.output", rules.truth),
        "lora_rank": SCRIPT["lora_r"],
        "lora_alpha": SCRIPT["lora_alpha"],
        "lora_dropout": SCRIPT["lora_dropout"],
        "use_dora": SCRIPT["use_dora"],
        "quantize_base": when_on("quantize", True),
    }


def _builder(value: Any) -> RuleResult:
    if family(value) not in FAMILIES or "classifier" in str(value) or "reward" in str(value):
        hint = f"the families are {', '.join(FAMILIES)}"
        return refused("is not a known language model", hint, blocks=True)
    if str(value).rpartition(".")[2].startswith(("lora_", "qlora_")):
        return sets("adapter", lambda _: True)(value)
    return RuleResult(outcome="default", why="the config.json in checkpoint_dir says it")


def _attention(value: Any) -> list[str]:
    names = rules.names(value)
    if unknown := [name for name in names if name not in ATTENTION]:
        raise rules.WrongValueError(f"{unknown[0]!r} is not a layer of attention", blocks=True)
    return [ATTENTION[name] for name in names]


def _targets(report: Report) -> None:
    """Make the layers of a LoRA builder one fact."""
    found = [*report.value("tune.attention", [])]
    found += MLP if report.value("tune.mlp") else ()
    found += ["lm_head"] if report.value("tune.output") else []
    for fact in ("tune.attention", "tune.mlp", "tune.output"):
        for entry in report.of(fact):
            entry.content = found
        if found:
            report.rename(fact, TARGETS)
