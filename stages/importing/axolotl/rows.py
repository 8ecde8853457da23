"""Data sets of axolotl: the blocks of `datasets`, `test_datasets` and `pretraining_dataset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.report import NO_BLOCK, Report
from stages.importing.rules import RuleResult, Table, WrongValueError, allowed, refused, sets
from stages.importing.sources import HELD, TRAIN, Style
from stages.importing.trainer import named_template, template_setting

STYLES = {
    "alpaca": Style(form="alpaca", template=False),
    "chat_template": Style(),
    "completion": Style(running=True),
    "pretrain": Style(running=True),
}
FORMS = {"messages": "messages", "conversations": "sharegpt"}
"""Key of the conversations in a row -> form of data.chat."""
SHAREGPT = {"role": "from", "content": "value"}
ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model"),
    "system": ("system",),
    "tool": ("tool", "observation"),
}
LISTS = {"datasets": TRAIN, "pretraining_dataset": TRAIN, "test_datasets": HELD}
"""Keys with lists of data sets -> beginning of their facts."""
_RENAME = "rename the column in the data"


def _style(value: Any) -> Style:
    if isinstance(value, Mapping):
        why = "prompts of one's own are not laid out"
        raise WrongValueError(why, "convert the rows to `prompt` and `completion`", blocks=True)
    if str(value).startswith("sharegpt"):
        why, hint = "axolotl has removed it", "write type: chat_template"
        raise WrongValueError(why, f"{hint}, field_messages: conversations", blocks=True)
    hint = "convert the rows to `messages`, for type: chat_template"
    found: Style = rules.choice(STYLES, hint, blocks=True)(value)
    return found


def _mappings(one: str) -> rules.Rule:
    """Return the rule for the names of roles and contents in messages."""
    sharegpt = sets(f"{one}form", lambda _: "sharegpt")

    def rule(value: Any) -> RuleResult:
        if value in (None, {}, {"role": "role", "content": "content"}):
            return rules.ignored("messages have role and content")
        return sharegpt(value) if value == SHAREGPT else refused("names other keys", _RENAME)

    return rule


def _roles(value: Any) -> RuleResult:
    given = value if isinstance(value, Mapping) else {}
    known = all({*rules.names(names)} <= {*ROLES.get(to, ())} for to, names in given.items())
    if known:
        return rules.ignored("data.chat knows these names")
    return refused("names other roles", "rename them in the data")


def _to_train(value: Any) -> str:
    names = rules.names(value)
    if not names or not {*names} <= {*ROLES["assistant"]}:
        raise WrongValueError("trains on others than the assistant", "set data.loss: all")
    return "assistant"


def _table(one: str) -> Table:
    """Return the table of a data set whose facts begin with `one`."""
    return rules.table({
        "path": sets(f"{one}path"),
        "data_files": sets(f"{one}files", rules.names),
        "name": sets(f"{one}config"),
        "split": sets(f"{one}split"),
        "revision": sets(f"{one}revision"),
        "type": sets(f"{one}style", _style),
        "ds_type": rules.passes("the ending of a file says it"),
        "field text_column": sets(f"{one}text_key"),
        "field_messages": sets(f"{one}form", rules.choice(FORMS, _RENAME)),
        "message_property_mappings": _mappings(one),
        "message_field_role": allowed("role", hint=_RENAME),
        "message_field_content": allowed("content", hint=_RENAME),
        "message_field_training": allowed("train", hint=_RENAME),
        "field_tools": allowed("tools", hint=_RENAME),
        "field_thinking template_thinking_key": allowed("reasoning_content"),
        "roles": _roles,
        "roles_to_train": sets("data.loss", _to_train),
        "train_on_eos train_on_eot": allowed("turn"),
        "chat_template": named_template,
        "chat_template_jinja drop_system_message split_thinking conversation input_format "
        "input_transform message_field_training_detail field_human field_model": template_setting,
        "shards shards_idx skip": rules.unsupported(
            "files are read as a whole", "write those rows to a separate file"),
        "preprocess_shards": rules.passes(),
        "trust_remote_code": rules.unsupported("data sets bring no code along", "convert them"),
    })  # fmt: skip


def templated(blocks: Any) -> bool:
    """Return whether a chat template lays out the rows of one of the data sets."""
    return isinstance(blocks, list) and any(_type(block) == "chat_template" for block in blocks)


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def read(report: Report, file: str, key: str, blocks: list[Any], first: int) -> None:
    """Read a list of data sets, the first of which has the number `first`."""
    for index, block in enumerate(blocks):
        one, name = f"{LISTS[key]}{first + index}.", f"{key}[{index}]"
        content = {"path": block} if isinstance(block, str) else block
        if isinstance(content, Mapping) and content:
            report.read(file, content, _table(one), f"{name}.")
        else:
            off = rules.is_off(content)
            report.enter(file, name, content, rules.unset() if off else refused(NO_BLOCK))
        if key == "pretraining_dataset" and isinstance(content, Mapping):
            report.default(f"{one}style", STYLES["pretrain"], "text to train on")
        elif key != "pretraining_dataset" and _type(content) == "chat_template":
            report.default(f"{one}form", "messages", "axolotl's default")
