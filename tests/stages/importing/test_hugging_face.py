"""Files are recognised, and every key has an outcome: of accelerate, DeepSpeed and transformers,
and of tools with recipes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from pipeline.commands.recipes import outcome_json, outcome_table
from pipeline.errors import UsageError
from pipeline.importing.translator import (
    Request,
    Translation,
    choose,
    installed_translators,
)
from stages.importing.hugging_face import KINDS, HuggingFace, tool_of
from stages.importing.rules import TABLES, Table, parts, value_of
from tests.stages.importing.support import (
    TRANSLATORS,
    Case,
    assert_case,
    cases,
    config,
    file,
    from_files,
    made,
    outcome,
    slot,
    translated,
)
from tests.support.tier import times

INSTALLED = [TRANSLATORS[name] for name in ("axolotl", "trainer", "llama_factory", "torchtune")]
RECIPES = [(tool, name) for tool, names in {
    "axolotl": "lora qlora full", "llama_factory": "lora qlora full pretrain dpo",
    "torchtune": "lora full"}.items() for name in names.split()]  # fmt: skip
TOOLS = {parts(text)[0]: parts(text)[2] for text in TABLES["signs"].values()}
ENGINE = file("ds.json", {"zero_optimization": {"stage": 2}, "train_batch_size": 8})
LAUNCH = file("launch.yaml", {"distributed_type": "MULTI_GPU", "num_processes": 4})


@pytest.mark.parametrize("case", cases("trainer", "engines"))
def test_keys(case: Case) -> None:
    assert_case(case)


@pytest.mark.parametrize(("tool", "name"), RECIPES)
def test_a_recipe_is_recognised(tool: str, name: str) -> None:
    content = config(f"{tool}/{name}.yaml")
    assert choose([file("r.yaml", content)], INSTALLED).name == tool
    assert HuggingFace().kind(content) is None
    assert HuggingFace().other_tool(content) is None


def test_files_of_accelerate_and_deepspeed_are_not_a_tool_s() -> None:
    assert choose([ENGINE], INSTALLED).name == "hugging_face"
    assert choose([LAUNCH, ENGINE], INSTALLED).name == "hugging_face"
    recipe = file("r.yaml", config("axolotl/lora.yaml"))
    assert choose([recipe, ENGINE], INSTALLED).name == "axolotl"
    found = choose([recipe, LAUNCH], INSTALLED).translate([recipe, LAUNCH], Request())
    assert found.recipe is not None
    assert found.recipe["launch"] == {"procs": 4}
    with pytest.raises(UsageError, match="these files belong to different tools"):
        choose([file("t.yaml", config("torchtune/lora.yaml")), ENGINE], INSTALLED)
    with pytest.raises(UsageError, match="are both recipes of axolotl"):
        TRANSLATORS["axolotl"].translate([recipe, recipe], Request())


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"num_processes": 2}, "accelerate config"),
        ({"mixed_precision": "bf16", "num_machines": 1, "use_cpu": True}, "accelerate config"),
        ({"use_cpu": True, "num_machines": 1, "main_process_port": 29500}, None),
        ({"fp16": True, "fsdp_config": {"fsdp_version": 2}}, None),
        ({"fsdp": True, "fsdp_config": {"fsdp_version": 2}}, "transformers TrainingArguments"),
        ({"gradient_accumulation_steps": 4}, None),
        ({"gradient_accumulation_steps": 4, "seed": 1}, None),  # files of many tools have these
        ({"learning_rate": 1e-4, "weight_decay": 0.1, "max_steps": 5, "seed": 1}, None),
        ({"learning_rate": 1e-4, "one": 1, "two": 2}, None),  # mostly unknown keys
        ({"gradient_accumulation_steps": 4, "optim": "x"}, "transformers TrainingArguments"),
        ({"gradient_accumulation_steps": 4, "bf16": {"enabled": True}}, "DeepSpeed configuration"),
    ],
)
def test_a_kind_shows_by_a_key_that_it_alone_has(content: dict[str, Any], kind: str | None) -> None:
    assert HuggingFace().kind(content) == kind
    if kind is None:
        with pytest.raises(
            UsageError, match=r"launch\.yaml: its keys do not show which kind of co"
        ):
            choose([file("launch.yaml", content)], [HuggingFace()])


def test_the_message_about_an_unknown_file_names_every_tool() -> None:
    with pytest.raises(UsageError) as caught:
        choose([file("x.yaml", {"some": "thing"})], INSTALLED)
    for sign in ("an accelerate config has `distributed_type`", "`base_model`", "`finetuning_type`",
                 "`_component_`"):  # fmt: skip
        assert sign in str(caught.value)


@pytest.mark.parametrize("tool", [*config("other_tools.yaml")])
def test_files_of_other_tools_are_refused_with_what_to_do(tool: str) -> None:
    translators = installed_translators()
    for content in config("other_tools.yaml")[tool]:
        with pytest.raises(UsageError, match=rf"c\.yaml: is a file of {re.escape(tool)}") as caught:
            choose([file("c.yaml", content)], translators)
        assert str(caught.value).endswith(")")  # a hint
        assert TOOLS[tool] in str(caught.value)


def test_a_single_common_word_makes_no_tool() -> None:
    words = ("num_epochs", "micro_batch_size", "val_set_size", "template", "lora_rank",
             "cutoff_len", "base_model", "stage", "dataset_dir", "sequence_len")  # fmt: skip
    for word in words:
        assert tool_of({word: 1, "learning_rate": 1e-4, "output_dir": "x"}) is None


def test_no_keys_of_another_tool_are_among_those_that_are_read() -> None:
    names = [*TOOLS]
    read = {"axolotl": TABLES["axolotl"], "LLaMA-Factory": TABLES["llama_factory"]}
    for text, whole in TABLES["signs"].items():
        tool, sign = parts(whole)[0], {*text.split("+")}
        assert not any(sign <= {*TABLES[name]} for name in KINDS.values()), (tool, sign)
        for name, keys in read.items():  # an earlier tool wins
            earlier = names.index(tool) < names.index(name)
            assert not (earlier and sign <= {*keys}), (tool, sign, name)


def test_the_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    ours = {key: value_of(text) for key, text in TABLES["trainer-defaults"].items()}
    assert ours.pop("checkpoint.keep").startswith("null")
    assert {key: theirs[key] for key in ours} == ours
    assert theirs["save_total_limit"] is None  # so all checkpoints are kept


def test_files_that_arguments_name(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text('{"output_dir": "x", "deepspeed": "ds.json"}')
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {}}')
    both = from_files(tmp_path, "args.json", "ds.json")
    assert slot(both, "wrap") == {"use": "wrap.zero", "stage": 1}
    assert outcome(both, "deepspeed").why == "is read as a separate file"
    alone = from_files(tmp_path, "args.json")
    assert alone.recipe is None
    assert outcome(alone, "deepspeed").hint.startswith(f"give it too: pipe import {tmp_path}/args")


SECRET = "do-not-write-me"


@pytest.mark.parametrize(
    ("tool", "said", "hint"),
    [
        *(("trainer", {"output_dir": "x", key: SECRET}, "set HF_TOKEN in the environment")
          for key in ("hub_token", "push_to_hub_token", "use_auth_token")),
        ("axolotl", {"wandb_api_key": SECRET}, "set WANDB_API_KEY in the environment"),
        *(("axolotl", {"mlflow_tracking_uri": uri, "use_mlflow": True},
           "set MLFLOW_TRACKING_URI in the environment")
          for uri in (f"https://me:{SECRET}@host", f"https://host?token={SECRET}")),
        ("torchtune", {"metric_logger": {"_component_": "x.CometLogger", "api_key": SECRET}}, None),
    ],
)  # fmt: skip
def test_secrets_are_shown_nowhere(tool: str, said: dict[str, Any], hint: str | None) -> None:
    base = {"axolotl": {"base_model": "a/b", "micro_batch_size": 1}, "torchtune": {"batch_size": 2}}
    found = made(tool, said, base.get(tool, {}))
    key = next(key for key in said if key != "output_dir")
    if hint:
        assert (outcome(found, key).outcome, outcome(found, key).hint) == ("refused", hint)
    shown = json.dumps([outcome_json(found), *found.notes.values()])
    told = [line for line in outcome_table(found) if "mlflow_tracking_uri:" not in line]
    assert SECRET not in shown.replace(str(said.get("mlflow_tracking_uri")), "") + "\n".join(told)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(allow_nan=False), st.just("auto"),
    st.sampled_from(["steps", "no", "cpu", "nvme", "linear", "AdamW", "1e-3", "", "x/y"]),
    st.lists(st.floats(0, 1), max_size=2),
)  # fmt: skip
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
LISTS = st.lists(st.fixed_dictionaries({}, optional={
    "path": st.sampled_from(["a/b", "/x/y.jsonl", "", "json", "/x.csv", None]),
    "type": st.sampled_from(["alpaca", "chat_template", "completion", "sharegpt", None, {}]),
    "split": st.sampled_from(["train", "train[:5%]", None]),
    "field": st.sampled_from(["text", "body", 3]),
    "field_messages": st.sampled_from(["messages", "conversations", "x"]),
    "roles": st.sampled_from([{"user": ["human"]}, {"user": 3}, [], None]),
    "data_files": st.sampled_from(["x.json", ["x.json"], 3]),
}), max_size=3)  # fmt: skip
OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "axolotl": {"base_model": st.just("a/b"), "datasets": LISTS, "fsdp_config": st.just({})},
    "llama_factory": {
        "template": st.just("qwen"), "stage": st.sampled_from(["sft", "pt"]),
        "dataset": st.sampled_from(["a,b", "a", None]),
    },
    "torchtune": {
        "model": st.sampled_from([{"_component_": "torchtune.models.llama3.lora_llama3_8b"},
                                  {"_component_": 3}, {"_component_": "torchtune.models.x"}]),
        "dataset": st.sampled_from([{"_component_": "torchtune.datasets.alpaca_dataset"},
                                    {"_component_": "x", "source": 3}, 4, []]),
    },
}  # fmt: skip
INFO = file("dataset_info.json", {"a": {"file_name": "a.json"}, "b": {"hf_hub_url": "o/b"}})


def contents(table: Table) -> st.SearchStrategy[dict[str, Any]]:
    """Draw blocks of a table's keys with arbitrary values."""
    entries = {
        key: VALUES if callable(rule) else st.one_of(VALUES, contents(rule))
        for key, rule in table.items()
        if key not in ("deepspeed", "fsdp_config")  # the keys that name files
    }
    return st.fixed_dictionaries({}, optional=entries)


def leaves(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the keys whose value is no block, or an empty one."""
    found: list[str] = []
    for key, value in content.items():
        inner = isinstance(value, Mapping) and value
        found += leaves(value, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return found


def assert_every_key_has_an_outcome(content: Mapping[str, Any], found: Translation) -> None:
    """Assert that each key has one outcome, with what became of it or the reason."""
    for leaf in leaves(content):
        keys = [each.key for each in found.outcomes if f"{leaf}.".startswith(f"{each.key}.")]
        assert len(keys) == 1, (leaf, keys)
    for each in found.outcomes:
        assert bool(each.to) == (each.outcome == "translated")
        assert each.to or each.why or each.outcome == "not translated"
    assert (found.recipe is None) == any(each.blocks for each in found.outcomes)


@pytest.mark.parametrize("kind", [*KINDS])
@settings(max_examples=times(quick=60, full=600), phases=PHASES)
@given(data=st.data())
def test_every_key_has_an_outcome(kind: str, data: st.DataObject) -> None:
    content = data.draw(contents(TABLES[KINDS[kind]]))
    assume(HuggingFace().kind(content) == kind)
    assert_every_key_has_an_outcome(content, translated(content))


@pytest.mark.parametrize("tool", [*OWN])
@settings(max_examples=times(quick=60, full=600), phases=PHASES, deadline=None)
@given(data=st.data())
def test_every_key_of_a_recipe_has_an_outcome(tool: str, data: st.DataObject) -> None:
    free = {key: rule for key, rule in TABLES[tool].items() if key not in OWN[tool]}
    content = {**data.draw(contents(free)), **data.draw(st.fixed_dictionaries(OWN[tool]))}
    files = [file("recipe.yaml", content), *([INFO] if tool == "llama_factory" else [])]
    assert TRANSLATORS[tool].supports(files)
    found = TRANSLATORS[tool].translate(files, Request())
    # each block of a list has keys of its own
    plain = {key: value for key, value in content.items() if key not in ("datasets", "dataset")}
    assert_every_key_has_an_outcome(plain, found)


def test_every_row_of_a_table_takes_any_value() -> None:
    def rules(table: Mapping[str, Any]) -> list[Any]:
        blocks = [each for each in table.values() if isinstance(each, Mapping)]
        return [each for each in table.values() if callable(each)] + [
            rule for block in blocks for rule in rules(block)
        ]

    found = [rule for table in TABLES.values() for rule in rules(table)]
    assert len(found) > 1000
    for rule in found:
        for value in (None, True, 1, 0.5, "x", "auto", ["a"], {"a": 1}):
            assert rule(value).outcome in ("translated", "default", "not translated", "refused")
