"""axolotl's recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.importing import ConfigFile
from stages.importing import rules
from stages.importing.axolotl.keys import TABLE
from stages.importing.draft import Draft, Rows
from stages.importing.engines import set_words
from stages.importing.parallelism import AUTO, CONTEXT, RING, TENSOR
from stages.importing.reader import deepspeed, unread
from stages.importing.rules import Table, WrongValueError, outcome, rule, table
from stages.importing.sources import HELD, TRAIN, Style
from stages.importing.tools import AXOLOTL
from stages.importing.trainer import SHARED
from stages.importing.translator import RecipeTranslator

DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0, "seed": 42,
    "weight_decay": 0.0, "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine",
    "sequence_len": 512, "excess_length_strategy": "drop", "save_total_limit": 4,
    "lora_dropout": 0.0,
}  # fmt: skip
"""Defaults of axolotl that differ from the recipe's."""
OWN = "axolotl's default"
SWITCHES = (
    ("fsdp_config", "strategy", "wrap.fsdp"), ("wandb_project", "wandb.use", True),
    ("mlflow_experiment_name", "mlflow.use", True), ("trackio_project_name", "trackio.use", True),
)  # fmt: skip
"""Keys that switch their strategy or tracker on."""


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

    def read(self, draft: Draft, file: ConfigFile) -> None:
        content = {**file.content}
        for key in LISTS:
            if value := content.get(key):
                each = value if isinstance(value, list) else [value]
                content[key] = [{"path": one} if isinstance(one, str) else one for one in each]

        def rows(block: Mapping[str, Any], one: str, name: str) -> Table:
            streamed = name.startswith("pretraining_dataset")
            draft.default(f"{one}style", STYLES["pretrain"], "text to train on", when=streamed)
            draft.default(f"{one}form", "messages", OWN, when=not streamed and _is_chat(block))
            return ROWS

        own = {key: Rows(kind, rows) for key, kind in LISTS.items()}
        every = {**TABLE, **_in_company(content), **deepspeed(draft, file), **own}
        draft.read(file.path.name, content, every)
        _defaults(draft, content)
        sharded, engine = draft.value("strategy") == "wrap.fsdp", bool(content.get("deepspeed"))
        draft.rename("axolotl.tensor", AUTO if engine else TENSOR)
        draft.rename("axolotl.context", CONTEXT if sharded and not engine else RING)

    def finish(self, draft: Draft) -> None:
        often = ("save_steps", "save_strategy", "save_part")
        saved = any(draft.of(fact) for fact in often)
        if not saved and draft.slots["train"].get("epochs") != 1:
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
        found["adapter"] = rule(f"refused axolotl needs {' and '.join(missing)} too !!")
    elif get("adapter") == "qlora" and not get("load_in_4bit"):
        found["adapter"] = rule("refused qlora needs load_in_4bit !! set load_in_4bit: true")
    return found


def _defaults(draft: Draft, content: Mapping[str, Any]) -> None:
    draft.set_defaults(DEFAULTS, TABLE, OWN)
    draft.default("adapter", False, OWN)
    draft.default("data.loss", "assistant", "axolotl trains on what the assistant says")
    warmup, cold = "axolotl's default, which is 100 steps at most", not draft.given("warmup_steps")
    draft.default("warmup_ratio", 0.03, warmup, when=cold and not draft.given("warmup_ratio"))
    bf16 = not rules.is_off(content.get("bf16", "auto"))
    draft.default("precision.compute", "bf16", OWN, when=bf16)
    # Texts see each other at most in `pretraining_dataset`.
    packed = bool(draft.value("data.packing", False))
    if streamed := content.get("pretraining_dataset"):
        apart = packed and draft.value("apart")
        draft.rename("apart", "data.documents_apart", content=apart)
    draft.default("data.documents_apart", packed or not streamed, OWN)
    for event in ("eval", "save"):
        steps = f"{event}_steps"
        draft.default(f"{event}_strategy", "steps", f"{steps} is set", when=draft.given(steps))
    if draft.value("eval_strategy") == "steps" or draft.given("eval_part"):
        draft.default("train.eval_first", True, "axolotl evaluates before the first step too")
    set_words(draft, content.get("fsdp"))
    for key, fact, value in SWITCHES:
        draft.default(fact, value, f"{key} is set", when=content.get(key))
    # A model that is trained as a whole is held in bf16, unless DeepSpeed or FSDP1 make masters in
    # fp32 of it.
    given = content.get("fsdp_config")
    block = given if isinstance(given, Mapping) else {}
    version = content.get("fsdp_version") or block.get("fsdp_version") or block.get("version") or 1
    sharded = bool(block or content.get("fsdp"))
    upcast = content.get("deepspeed") or (sharded and str(version) != "2")
    whole = not draft.value("adapter", False) and draft.value("precision.compute") == "bf16"
    why = "axolotl holds the weights in bf16; fp32 keeps small updates"
    draft.default("precision.master", "bf16", why, when=whole and not upcast)


STYLES = {
    "alpaca": Style(form="alpaca", template=False),
    "chat_template": Style(),
    "completion": Style(running=True),
    "pretrain": Style(running=True),
}
ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model"),
    "system": ("system",),
    "tool": ("tool", "observation"),
}
LISTS = {"datasets": TRAIN, "pretraining_dataset": TRAIN, "test_datasets": HELD}
"""Keys with lists of data sets -> beginning of their facts."""


def _mappings(value: Any) -> rules.RuleResult:
    """Read the names of roles and contents in messages."""
    if value == {"role": "from", "content": "value"}:
        return rules.translated(".form", "sharegpt")
    usual = value in (None, {}, {"role": "role", "content": "content"})
    return outcome("ignored messages have role and content" if usual else
                   "refused names other keys -- rename the column in the data")  # fmt: skip


def _roles(value: Any) -> rules.RuleResult:
    given = value.items() if isinstance(value, Mapping) else ()
    known = all({*rules.names(names)} <= {*ROLES.get(to, ())} for to, names in given)
    return outcome("ignored data.chat knows these names" if known else
                   "refused names other roles -- rename them in the data")  # fmt: skip


def _to_train(value: Any) -> str:
    names = rules.names(value)
    if not names or not {*names} <= {*ROLES["assistant"]}:
        raise WrongValueError("trains on others than the assistant -- set data.loss: all")
    return "assistant"


ROWS = table("""
    path: .* | name: .config | split revision: .* | data_files: .files names
    type: if \\{.* then never prompts of one's own are not laid out !! convert the rows to \
        `prompt` and `completion` else if sharegpt.* then never axolotl has removed it !! write \
        type: chat_template, field_messages: conversations else .style styles !! convert the rows \
        to `messages`, for type: chat_template
    ds_type: ignored the ending of a file says it | field text_column: .text_key
    field_messages: .form messages, conversations=sharegpt -- rename the column in the data
    message_property_mappings: @mappings
    message_field_role: always role -- rename the column in the data
    message_field_content: always content -- rename the column in the data
    message_field_training: always train -- rename the column in the data
    field_tools: always tools -- rename the column in the data
    field_thinking template_thinking_key: always reasoning_content | roles: @roles
    roles_to_train: data.loss trained | train_on_eos train_on_eot: always turn
    chat_template: @named_template
    chat_template_jinja drop_system_message split_thinking conversation input_format input_transform
    message_field_training_detail field_human field_model: @template_setting
    shards shards_idx skip: refused files are read as a whole -- write those rows to a separate file
    preprocess_shards: ignored changes nothing that is trained
    trust_remote_code: refused data sets bring no code along -- convert them
""", **SHARED, styles=STYLES, mappings=_mappings, trained=_to_train,
    roles=_roles)  # fmt: skip
"""Keys of a data set."""


def _is_chat(block: Any) -> bool:
    """Return whether a chat template lays out the rows of a data set."""
    return isinstance(block, Mapping) and block.get("type") == "chat_template"
