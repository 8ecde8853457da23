"""axolotl's YAML recipes, as of version 0.19."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pipeline.importing import ConfigFile
from stages.importing import rules
from stages.importing.draft import Draft, Rows
from stages.importing.hugging_face import RecipeTranslator, engines, unread
from stages.importing.recipe import part_of_epoch
from stages.importing.rules import Rule, RuleResult, Table, outcome, value_of, why
from stages.importing.sources import HELD, RUNNING, TRAIN

OWN = "axolotl's default"
LISTS = {"datasets": TRAIN, "pretraining_dataset": TRAIN, "test_datasets": HELD}
"""Keys with lists of data sets -> beginning of their facts."""


def plugins(value: object) -> RuleResult:
    unknown = ", ".join(n for n in rules.names(value) if n not in TABLES["axolotl-plugins"])
    return outcome(why("unknown_plugins", unknown) if unknown else why("harmless"))


def roles(value: Any) -> RuleResult:
    """Read the names that messages have for each role."""
    given, ours = value.items() if isinstance(value, Mapping) else (), TABLES["axolotl-roles"]
    known = all(ours.get(name) == to for to, names in given for name in rules.names(names))
    return outcome(why("known_roles" if known else "other_roles"))


def trained(value: Any) -> str:
    """Return the loss for the roles that are trained on."""
    roles = {TABLES["axolotl-roles"].get(name) for name in rules.names(value)}
    if roles != {"assistant"}:
        raise rules.WrongValueError(why("other_trained"))
    return "assistant"


TABLES = rules.load(
    "axolotl", plugins, roles, trained,
    on=lambda _: True,
    negated=lambda value: not rules.truth(value),
    each_epoch=lambda value: part_of_epoch(Fraction(1, rules.positive(value))),
)  # fmt: skip


class Axolotl(RecipeTranslator):
    """A recipe of axolotl, with the DeepSpeed JSON that it names."""

    name = tool = "axolotl"
    signs = "a recipe of axolotl has `base_model`"

    def read(self, draft: Draft, file: ConfigFile) -> None:
        content = {**file.content}
        for key in LISTS:
            if value := content.get(key):
                each = value if isinstance(value, list) else [value]
                content[key] = [{"path": one} if isinstance(one, str) else one for one in each]

        def rows(block: Mapping[str, Any], one: str, name: str) -> Table:
            if name.startswith("pretraining_dataset"):
                draft.default(f"{one}style", RUNNING, "text to train on")
            elif _is_chat(block):
                draft.default(f"{one}form", "messages", OWN)
            draft.default(f"{one}template", False, OWN)
            return TABLES["axolotl-rows"]

        own = {key: Rows(kind, rows) for key, kind in LISTS.items()}
        every = {**self.table, **_in_company(content), **engines(draft, file), **own}
        draft.read(file.path.name, content, every)
        draft.set_defaults("axolotl", self.table, OWN)
        # Texts see each other at most in `pretraining_dataset`.
        packed = bool(draft.value("data.packing", False))
        streamed = content.get("pretraining_dataset")
        if streamed:
            draft.rename("apart", "data.documents_apart", content=packed and draft.value("apart"))
        cold = not (draft.given("warmup_steps") or draft.given("warmup_ratio"))
        for fact, value, reason, holds in (
            ("adapter", False, OWN, True),
            ("warmup_ratio", 0.03, "axolotl's default, which is 100 steps at most", cold),
            ("precision.compute", "bf16", OWN, not rules.is_off(content.get("bf16", "auto"))),
            ("data.documents_apart", packed or not streamed, OWN, True),
            *((f"{name}_strategy", "steps", f"{name}_steps is set", draft.given(f"{name}_steps"))
              for name in ("eval", "save")),
            *((fact, value_of(value), f"{key} is set", content.get(key))
              for key, given in TABLES["axolotl-set"].items() for fact, value in [given.split()]),
        ):  # fmt: skip
            draft.default(fact, value, reason, when=holds)
        evaluates = draft.value("eval_strategy") == "steps" or draft.given("eval_part")
        first = "axolotl evaluates before the first step too"
        draft.default("train.eval_first", True, first, when=evaluates)
        # A model that is trained as a whole is held in bf16, unless DeepSpeed or FSDP1 make masters
        # in fp32 of it.
        given = content.get("fsdp_config")
        block = given if isinstance(given, Mapping) else {}
        versions = (content.get("fsdp_version"), block.get("fsdp_version"), block.get("version"))
        old = "2" not in map(str, [*filter(None, versions)][:1])
        upcast = content.get("deepspeed") or ((block or content.get("fsdp")) and old)
        whole = not draft.value("adapter", False) and draft.value("precision.compute") == "bf16"
        held = "axolotl holds the weights in bf16; fp32 keeps small updates"
        draft.default("precision.master", "bf16", held, when=whole and not upcast)
        sharded, engine = draft.value("strategy") == "wrap.fsdp", bool(content.get("deepspeed"))
        draft.rename("axolotl.tensor", "deepspeed.tensor" if engine else "parallel.tensor")
        context = "context" if sharded and not engine else "ring"
        draft.rename("axolotl.context", f"parallel.{context}")

    def finish(self, draft: Draft) -> None:
        saves = [*map(draft.of, ("save_steps", "save_strategy", "save_part"))]
        if not any(saves) and draft.slots["train"].get("epochs") != 1:
            draft.put("checkpoint.every", "1 epoch", note=OWN)


def _in_company(content: Mapping[str, Any]) -> Table:
    """Return the rules of keys that mean nothing, or nothing good, in the company of others."""
    get, held = content.get, content.get("val_set_size")
    none = (rules.is_off(held) or held in ("0", "0.0")) and not get("test_datasets")
    schedule = str(get("lr_scheduler") or "cosine").lower()
    templated = isinstance(get("datasets"), list) and any(map(_is_chat, content["datasets"]))
    found = unread(
        ("bf16", get("fp16") and get("bf16") == "auto", "fp16 is set"),
        ("lora_target_modules", get("lora_target_linear") and get("lora_target_modules"),
         "lora_target_linear takes all"),
        ("chat_template", get("chat_template") and not templated,
         "no data set has type: chat_template"),
        *((key, none and get(key), "nothing is held out: no val_set_size")
          for key in ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy")),
        ("cosine_min_lr_ratio", get("cosine_min_lr_ratio") is not None and schedule != "cosine",
         f"lr_scheduler is {schedule}"),
    )  # fmt: skip
    missing = [key for key in ("lora_r", "lora_alpha") if not get(key)]
    if get("adapter") in ("lora", "qlora") and missing:
        found["adapter"] = Rule(why("incomplete_lora", " and ".join(missing)))
    elif get("adapter") == "qlora" and not get("load_in_4bit"):
        found["adapter"] = TABLES["words"]["incomplete_qlora"]
    return found


def _is_chat(block: Any) -> bool:
    """Return whether a chat template lays out the rows of a data set."""
    return isinstance(block, Mapping) and block.get("type") == "chat_template"
