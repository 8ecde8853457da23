"""torchtune's YAML recipes for full_finetune and lora_finetune, as of version 0.6."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.importing import ConfigFile
from stages.importing import rules
from stages.importing.draft import Draft, Rows
from stages.importing.hugging_face import COMPONENT, RecipeTranslator
from stages.importing.rules import RuleResult, Table, outcome, why
from stages.importing.sources import HELD, RUNNING, TRAIN

SETS = {"dataset": TRAIN, "dataset_val": HELD}
"""Keys with data sets -> beginning of their facts."""
OWN = "torchtune's default"
SINGLE = "single_device"
"""Part of the name of files for one device. The recipes for several have the same keys."""


def builder(value: Any) -> RuleResult:
    """Read the function that builds the model."""
    if re.search("classifier|reward", str(value)) or not _family({COMPONENT: value}):
        return outcome(why("unknown_model", ", ".join(sorted(TABLES["torchtune-families"]))))
    if str(value).rpartition(".")[2].startswith(("lora_", "qlora_")):
        return RuleResult(fact="adapter", content=True)
    return outcome(why("known_model"))


def attention(value: Any) -> list[str]:
    """Return layers of attention, in the layout of Hugging Face."""
    layers = TABLES["torchtune-attention"]
    if unknown := [name for name in rules.names(value) if name not in layers]:
        raise rules.WrongValueError(f"refused {unknown[0]!r} is not a layer of attention !!")
    return [layers[name] for name in rules.names(value)]


def _columns(**names: str) -> Callable[[Any], RuleResult]:
    """Return the rule of a mapping of columns, which is to end in these."""
    others = ", ".join(names.values())
    return lambda value: outcome(
        why("known_columns") if {**names, **(value if isinstance(value, Mapping) else {})} == names
        else why("other_columns", others)
    )  # fmt: skip


TABLES = rules.load(
    "torchtune", builder, attention,
    all_or_assistant=lambda value: "all" if rules.truth(value) else "assistant",
    pairs=_columns(input="prompt", output="completion"),
    alpaca_columns=_columns(instruction="instruction", input="input", output="output"),
)  # fmt: skip


class Torchtune(RecipeTranslator):
    """A recipe of torchtune for full_finetune or lora_finetune."""

    name = tool = "torchtune"
    companions = ()
    signs = "a recipe of torchtune has blocks with `_component_`"

    def read(self, draft: Draft, file: ConfigFile) -> None:
        name, procs, draft.resolved = file.path.name, draft.request.procs, True
        content = _resolved(file.content)
        tokenizer: Any = content.get("tokenizer")
        plain = _family(tokenizer) == "plain" and not tokenizer.get("prompt_template")

        rows = functools.partial(_rows, draft, name, plain)
        logger = _component(content.get("metric_logger")).rpartition(".")[2].lower()
        table: dict[str, Any] = self.table | {
            "metric_logger": TABLES.get(f"torchtune-{logger}", self.table["metric_logger"]),
            "model": TABLES["fused-model" if _family(content.get("model")) == "fused" else "model"],
            **{key: Rows(kind, rows, blocking=True) for key, kind in SETS.items()},
        }
        # The tokenizer lays out conversations, and pairs if it puts anything around messages.
        sets = [content.get(key) for key in SETS]
        blocks = [one for each in sets for one in (each if isinstance(each, list) else [each])]
        kinds = {kind for one in blocks for kind in _builder(one)[:1]}
        if kinds & {"chat", "slimorca"} or ("instruct" in kinds and not plain):
            template = {COMPONENT: TABLES["words"]["their_template"]}
            table["tokenizer"] = {**table["tokenizer"], **template}
        draft.read(name, content, table)
        built = _component(content.get("model")).rpartition(".")[2]
        draft.default("quantize", True, f"{built} in {name}", when=built.startswith("qlora_"))
        draft.default("adapter", False, "the model's builder has no LoRA", when="model" in content)
        if draft.value("adapter"):
            draft.set_defaults("torchtune-adapter", {}, OWN)
            found = [*draft.value("tune.attention", [])]
            found += ("gate_proj", "up_proj", "down_proj") if draft.value("tune.mlp") else ()
            found += ["lm_head"] if draft.value("tune.output") else []
            for fact in ("tune.attention", "tune.mlp", "tune.output"):
                draft.rename(fact, "adapter.targets" if found else fact, content=found)
        draft.set_defaults("torchtune", self.table, OWN)
        if not draft.given("data.sequence_length"):
            draft.default("data.too_long", "error", "torchtune cuts no row")
        dtype = draft.value("precision.compute", "fp32")
        for field in ("master", "reduce") if dtype != "fp32" else ():
            draft.default(f"precision.{field}", dtype, "torchtune has one dtype for everything")
        steps = draft.value("cap", 0) * draft.value("train.epochs", 1)
        many = "epochs x steps, if an epoch has so many"
        draft.rename("cap", "train.steps", content=int(steps) or None, why=many)
        single = SINGLE in name if procs is None else procs == 1
        use = "wrap.ddp" if single else "wrap.fsdp"
        draft.default("strategy", use, f"for {'one device' if single else 'several devices'}")
        named = f"{SINGLE} in the name of the file"
        draft.default("procs", 1, named, when=single and procs is None)

    def finish(self, draft: Draft) -> None:
        if draft.given("export.adapter") and "adapter" in draft.slots:
            draft.put("export.use", "export.adapter", "export.adapter")
        if draft.slots["train"].get("epochs") != 1:
            draft.put("checkpoint.every", "1 epoch", note="torchtune saves after each epoch")
        draft.lacks("data.sequence_length")


def _component(block: Any) -> str:
    return str(block.get(COMPONENT, "")) if isinstance(block, Mapping) else ""


def _family(block: Any) -> str:
    """Return what is known of the family in the name of a block's builder; empty if nothing is."""
    words = _component(block).split(".")
    known = words[:2] == ["torchtune", "models"] and len(words) == 4
    return TABLES["torchtune-families"].get(words[2], "") if known else ""


def _builder(block: Any) -> list[str]:
    """Return what is known of the builder of a data set: kind, form, loss, data set of the hub."""
    name = _component(block).removeprefix("torchtune.datasets.")
    return str(TABLES["torchtune-builders"].get(name, "")).split()


def _rows(
    draft: Draft, file: str, plain: bool, block: Mapping[str, Any], one: str, key: str
) -> Table:
    """Return the rules of a data set whose facts begin with `one`, and set its defaults."""
    here = f"{key}.{COMPONENT} in {file}"
    if not (found := _builder(block)):
        return TABLES["unknown-rows"]
    kind, form, loss, *source = found
    # Text is cut where a sample is full.
    running = kind == "text" and bool(block.get("packed") and block.get("split_across_pack", 1))
    draft.default(f"{one}path", "".join(source), here, when=source)
    draft.default("data.loss", loss, OWN)
    draft.default(f"{one}style", RUNNING if running else form.strip("-"), here)
    draft.default(f"{one}template", False, here, when=plain)
    if running:
        kind = "text-running"
    elif kind == "alpaca" and not plain:
        kind = "alpaca-turn"
    elif kind == "instruct" and not block.get("column_map"):
        kind = "instruct-unmapped"
    elif kind == "chat" and block.get("conversation_style") == "sharegpt":
        kind = "chat-sharegpt"
    return {**TABLES["rows"], **TABLES[kind]}


def _resolved(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with OmegaConf's references to it (`${output_dir}/logs`) resolved."""

    def named(reference: re.Match[str]) -> str:
        found: Any = content
        for part in reference[1].split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        is_value = not (found is None or isinstance(found, Mapping | list))
        return json.dumps(str(found), ensure_ascii=False)[1:-1] if is_value else reference[0]

    text = json.dumps(content, ensure_ascii=False)
    for _ in range(10):  # as many may follow one another
        text = re.sub(r"\$\{([\w.]+)\}", named, text)
    resolved: dict[str, Any] = json.loads(text)
    return resolved
