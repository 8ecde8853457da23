"""axolotl's recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.importing import ConfigFile, Request
from stages.importing import rules
from stages.importing.axolotl import rows
from stages.importing.axolotl.keys import SWITCHES, TABLE
from stages.importing.engines import set_words
from stages.importing.parallelism import AUTO, CONTEXT, RING, TENSOR
from stages.importing.reader import Reader
from stages.importing.recipe_translator import RecipeTranslator
from stages.importing.report import Draft, Report
from stages.importing.sources import HELD, TRAIN
from stages.importing.tools import AXOLOTL

LISTS = {"datasets": TRAIN, "pretraining_dataset": TRAIN, "test_datasets": HELD}
"""Keys with lists of data sets -> beginning of their facts."""
DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0, "seed": 42,
    "weight_decay": 0.0, "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine",
    "sequence_len": 512, "excess_length_strategy": "drop", "save_total_limit": 4,
    "lora_dropout": 0.0,
}  # fmt: skip
"""Defaults of axolotl that differ from the recipe's."""
OWN = "axolotl's default"
WARMUP = "axolotl's default, which is 100 steps at most"


class Axolotl(RecipeTranslator):
    """A recipe of axolotl, with the DeepSpeed JSON that it names."""

    name = "axolotl"
    tool = AXOLOTL
    signs = "a recipe of axolotl has `base_model`"
    table = TABLE
    companies = (
        {},
        {"adapter": "lora", "lora_r": 8, "lora_alpha": 16},
        {"val_set_size": 0.1, "eval_strategy": "steps"},
    )

    def read(
        self, reader: Reader, recipe: ConfigFile, others: Sequence[ConfigFile], request: Request
    ) -> None:
        content = dict(recipe.content)
        report, file = reader.report, recipe.path.name
        _leave_out(reader, recipe, content)
        reader.deepspeed(recipe, content)
        first = 0
        for key, value in content.items():
            if key in LISTS and value:
                blocks = value if isinstance(value, list) else [value]
                _read_rows(report, file, key, blocks, first)
                first += len(blocks)
            else:
                report.read(file, {key: value}, TABLE)
        _defaults(reader, recipe.content)
        _axes(report, deepspeed=bool(recipe.content.get("deepspeed")))

    def finish(self, draft: Draft) -> None:
        _save_each_epoch(draft)


def _save_each_epoch(draft: Draft) -> None:
    often = ("save_steps", "save_strategy", "save_part")
    saved = any(draft.report.of(fact) for fact in often)
    if not saved and draft.slots["train"].get("epochs") != 1:
        draft.put("checkpoint.every", "1 epoch", note=OWN)


def _leave_out(reader: Reader, recipe: ConfigFile, content: dict[str, Any]) -> None:
    """Take out what axolotl does not read in the company of other keys."""
    if content.get("fp16") and content.get("bf16", "auto") == "auto" and "bf16" in content:
        reader.skip(recipe, content, "bf16", "fp16 is set")
    if content.get("lora_target_linear") and content.get("lora_target_modules"):
        reader.skip(recipe, content, "lora_target_modules", "lora_target_linear takes all")
    templated = any(_type(block) == "chat_template" for block in _blocks(content))
    if content.get("chat_template") and not templated:
        reader.skip(recipe, content, "chat_template", "no data set has type: chat_template")
    held = content.get("val_set_size")
    if (rules.is_off(held) or held in ("0", "0.0")) and not content.get("test_datasets"):
        for key in ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy"):
            if content.get(key):
                reader.skip(recipe, content, key, "nothing is held out: no val_set_size")
    schedule = str(content.get("lr_scheduler") or "cosine").lower()
    if content.get("cosine_min_lr_ratio") is not None and schedule != "cosine":
        reader.skip(recipe, content, "cosine_min_lr_ratio", f"lr_scheduler is {schedule}")
    missing = [key for key in ("lora_r", "lora_alpha") if not content.get(key)]
    if content.get("adapter") in ("lora", "qlora") and missing:
        why = f"axolotl needs {' and '.join(missing)} too"
        reader.refuse(recipe, content, "adapter", rules.refused(why, blocks=True))
    elif content.get("adapter") == "qlora" and not content.get("load_in_4bit"):
        result = rules.refused("qlora needs load_in_4bit", "set load_in_4bit: true", blocks=True)
        reader.refuse(recipe, content, "adapter", result)


def _blocks(content: Mapping[str, Any]) -> list[Any]:
    found = content.get("datasets")
    return found if isinstance(found, list) else []


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _read_rows(report: Report, file: str, key: str, blocks: list[Any], first: int) -> None:
    """Read a list of data sets, the first of which has the number `first`."""
    kind = LISTS[key]
    named = [{"path": each} if isinstance(each, str) else each for each in blocks]
    report.read_each(file, key, named, lambda number: rows.table(f"{kind}{number}."), first)
    for number, block in enumerate(named, first):
        style = rows.STYLES["pretrain"] if key == "pretraining_dataset" else None
        if style and isinstance(block, Mapping):
            report.default(f"{kind}{number}.style", style, "text to train on")
        elif _type(block) == "chat_template":
            report.default(f"{kind}{number}.form", "messages", OWN)


def _defaults(reader: Reader, content: Mapping[str, Any]) -> None:
    report = reader.report
    reader.defaults(DEFAULTS, TABLE, OWN)
    report.default("adapter", False, OWN)
    report.default("data.loss", "assistant", "axolotl trains on what the assistant says")
    if not report.given("warmup_steps") and not report.given("warmup_ratio"):
        report.default("warmup_ratio", 0.03, WARMUP)
    if not rules.is_off(content.get("bf16", "auto")):
        report.default("precision.compute", "bf16", OWN)
    _documents(report, streamed=bool(content.get("pretraining_dataset")))
    if report.given("eval_steps"):
        report.default("eval_strategy", "steps", "eval_steps is set")
    if report.value("eval_strategy") == "steps" or report.given("eval_part"):
        report.default("train.eval_first", True, "axolotl evaluates before the first step too")
    if report.given("save_steps"):
        report.default("save_strategy", "steps", "save_steps is set")
    if content.get("fsdp"):
        set_words(report, content["fsdp"])
    if content.get("fsdp_config"):
        report.default("strategy", "wrap.fsdp", "fsdp_config is set")
    for key, use in SWITCHES.items():
        if content.get(key):
            report.default(use, True, f"{key} is set")
    _masters(report, content)


def _documents(report: Report, *, streamed: bool) -> None:
    """Decide whether texts see each other: only those of `pretraining_dataset` may do so."""
    packed = bool(report.value("data.packing", False))
    if streamed:
        for entry in report.of("apart"):
            entry.content = packed and entry.content
        report.rename("apart", "data.documents_apart")
    report.default("data.documents_apart", packed or not streamed, OWN)


def _masters(report: Report, content: Mapping[str, Any]) -> None:
    """Note that a model that is trained as a whole is held in bf16, unless DeepSpeed or FSDP1 make
    masters in fp32 of it."""
    given = content.get("fsdp_config")
    block = given if isinstance(given, Mapping) else {}
    version = content.get("fsdp_version") or block.get("fsdp_version") or block.get("version") or 1
    sharded = bool(block or content.get("fsdp"))
    upcast = content.get("deepspeed") or (sharded and str(version) != "2")
    whole = not report.value("adapter", False) and report.value("precision.compute") == "bf16"
    if whole and not upcast:
        why = "axolotl holds the weights in bf16; fp32 keeps small updates"
        report.default("precision.master", "bf16", why)


def _axes(report: Report, *, deepspeed: bool) -> None:
    """Name the axes by what they are under the strategy in question."""
    sharded = report.value("strategy") == "wrap.fsdp"
    report.rename("axolotl.tensor", AUTO if deepspeed else TENSOR)
    report.rename("axolotl.context", CONTEXT if sharded and not deepspeed else RING)
