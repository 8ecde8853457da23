"""Properties of the recipes of every tool: recognised, accounted for, and right."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.importing.translator import ConfigFile, Request, Translator, choose
from stages.importing.axolotl import translator as axolotl
from stages.importing.llama_factory import translator as llama_factory
from stages.importing.rules import Table
from stages.importing.torchtune import translator as torchtune
from stages.importing.translator import HuggingFace
from tests.stages.importing.configs import axolotl as axolotl_recipes
from tests.stages.importing.configs import llama_factory as llama_factory_recipes
from tests.stages.importing.configs import torchtune as torchtune_recipes
from tests.stages.importing.drawn import assert_every_key_has_an_outcome, contents
from tests.support.tier import times

TRANSLATORS: list[Translator] = [
    axolotl.Axolotl(), HuggingFace(), llama_factory.LlamaFactory(), torchtune.Torchtune(),
]  # fmt: skip
RECIPES: dict[str, Mapping[str, Any]] = {
    "axolotl lora": axolotl_recipes.LORA,
    "axolotl qlora": axolotl_recipes.QLORA,
    "axolotl full": axolotl_recipes.FULL,
    "llama_factory lora": llama_factory_recipes.LORA,
    "llama_factory qlora": llama_factory_recipes.QLORA,
    "llama_factory full": llama_factory_recipes.FULL,
    "llama_factory pretrain": llama_factory_recipes.PRETRAIN,
    "llama_factory dpo": llama_factory_recipes.DPO,
    "torchtune lora": torchtune_recipes.LORA,
    "torchtune full": torchtune_recipes.FULL,
}


def file(name: str, content: Mapping[str, Any]) -> ConfigFile:
    return ConfigFile(path=Path(name), content=content)


ENGINE = file("ds.json", {"zero_optimization": {"stage": 2}, "train_batch_size": 8})
LAUNCH = file("launch.yaml", {"distributed_type": "MULTI_GPU", "num_processes": 4})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_recognised(name: str) -> None:
    assert choose([file("r.yaml", RECIPES[name])], TRANSLATORS).name == name.split()[0]
    assert HuggingFace().kind(RECIPES[name]) is None
    assert HuggingFace().other_tool(RECIPES[name]) is None


def test_files_of_accelerate_and_deepspeed_are_not_a_tool_s() -> None:
    assert choose([ENGINE], TRANSLATORS).name == "hugging_face"
    assert choose([LAUNCH, ENGINE], TRANSLATORS).name == "hugging_face"
    recipe = file("r.yaml", axolotl_recipes.LORA)
    assert choose([recipe, ENGINE], TRANSLATORS).name == "axolotl"
    found = choose([recipe, LAUNCH], TRANSLATORS).translate([recipe, LAUNCH], Request())
    assert found.recipe is not None
    assert found.recipe["launch"] == {"procs": 4}
    with pytest.raises(UsageError, match="these files belong to different tools"):
        choose([file("t.yaml", torchtune_recipes.LORA), ENGINE], TRANSLATORS)


def test_the_message_about_an_unknown_file_names_every_tool() -> None:
    with pytest.raises(UsageError) as caught:
        choose([file("x.yaml", {"some": "thing"})], TRANSLATORS)
    for sign in ("`distributed_type`", "`base_model`", "`finetuning_type`", "`_component_`"):
        assert sign in str(caught.value)


PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
TYPES = ("alpaca", "chat_template", "completion")
LISTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "path": st.sampled_from(["a/b", "/x/y.jsonl", "", "json", "/x.csv", None]),
            "type": st.sampled_from(
                ["alpaca", "chat_template", "completion", "sharegpt", None, {}]
            ),
            "split": st.sampled_from(["train", "train[:5%]", None]),
            "field": st.sampled_from(["text", "body", 3]),
            "field_messages": st.sampled_from(["messages", "conversations", "x"]),
            "roles": st.sampled_from([{"user": ["human"]}, {"user": 3}, [], None]),
            "data_files": st.sampled_from(["x.json", ["x.json"], 3]),
        },
    ),
    max_size=3,
)
DRAWN: dict[str, tuple[Translator, Table, dict[str, st.SearchStrategy[Any]]]] = {
    "axolotl": (
        TRANSLATORS[0], axolotl.TABLE,
        {"base_model": st.just("a/b"), "datasets": LISTS, "fsdp_config": st.just({})},
    ),
    "llama_factory": (
        TRANSLATORS[2], llama_factory.TABLE,
        {"template": st.just("qwen"), "stage": st.sampled_from(["sft", "pt"]),
         "dataset": st.sampled_from(["a,b", "a", None])},
    ),
    "torchtune": (
        TRANSLATORS[3], torchtune.keys.TOP,
        {"model": st.sampled_from([{"_component_": "torchtune.models.llama3.lora_llama3_8b"},
                                   {"_component_": 3}, {"_component_": "torchtune.models.x"}]),
         "dataset": st.sampled_from([{"_component_": "torchtune.datasets.alpaca_dataset"},
                                     {"_component_": "x", "source": 3}, 4, []])},
    ),
}  # fmt: skip
INFO = file("dataset_info.json", {"a": {"file_name": "a.json"}, "b": {"hf_hub_url": "o/b"}})


@pytest.mark.parametrize("tool", DRAWN)
@settings(max_examples=times(quick=60, full=600), phases=PHASES, deadline=None)
@given(data=st.data())
def test_every_key_has_an_outcome(tool: str, data: st.DataObject) -> None:
    translator, table, own = DRAWN[tool]
    free = {key: rule for key, rule in table.items() if key not in own}
    content = {**data.draw(contents(free)), **data.draw(st.fixed_dictionaries(own))}
    files = [file("recipe.yaml", content), *([INFO] if tool == "llama_factory" else [])]
    assert translator.supports(files)
    made = translator.translate(files, Request())
    listed = ("datasets", "dataset")  # each block of a list has keys of its own
    plain = {key: value for key, value in content.items() if key not in listed}
    assert_every_key_has_an_outcome(plain, made)


ROWS = {
    "alpaca": {"instruction": "a b", "input": "", "output": "c"},
    "chat": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "text": {"text": "a b c"},
}


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes rows of a form to a file, and returns its path."""

    def write(form: str) -> str:
        path = tmp_path / f"{form}.jsonl"
        path.write_text(f"{json.dumps(ROWS[form])}\n" * 8, encoding="utf-8")
        return str(path)

    return write


def on_this_machine(tool: str, model: Path, rows: Callable[[str], str]) -> dict[str, Any]:
    """Return a published recipe of the tool for a model and data that exist."""
    if tool == "axolotl":
        block = {"path": rows("alpaca"), "type": "alpaca"}
        return {**axolotl_recipes.LORA, "base_model": str(model), "datasets": [block],
                "attn_implementation": "sdpa", "sequence_len": 16}  # fmt: skip
    if tool == "llama_factory":
        entries = {"mine": {"file_name": rows("chat"), "formatting": "sharegpt"}}
        return {**llama_factory_recipes.LORA, "model_name_or_path": str(model), "dataset": "mine",
                "dataset_dir": entries, "trust_remote_code": False, "cutoff_len": 16}  # fmt: skip
    data = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "json",
            "data_files": rows("text"), "packed": True}  # fmt: skip
    checkpointer = {**torchtune_recipes.LORA["checkpointer"], "checkpoint_dir": str(model)}
    tokenizer = {**torchtune_recipes.LORA["tokenizer"], "max_seq_len": 16}
    return {**torchtune_recipes.LORA, "checkpointer": checkpointer, "dataset": data,
            "tokenizer": tokenizer}  # fmt: skip


@pytest.mark.parametrize("tool", DRAWN)
def test_a_translated_recipe_is_right(
    tool: str, model: Path, rows: Callable[[str], str], tmp_path: Path
) -> None:
    config, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump(on_this_machine(tool, model, rows)), encoding="utf-8")
    said = CliRunner().invoke(main, ["import", str(config), "-o", str(recipe), "--procs", "2"])
    assert said.exit_code == (0 if tool == "torchtune" else 3), said.output
    adapted = ["launch.device=cpu", "precision.compute=fp32", "optimizer.moments=master"]
    if tool == "torchtune":
        adapted += ["precision.master=fp32", "precision.reduce=fp32"]
    checked = CliRunner().invoke(main, ["check", str(recipe), *adapted])
    assert checked.exit_code == 0, checked.output


def test_weights_that_are_to_be_filled_in_are_not_right_yet(model: Path, tmp_path: Path) -> None:
    config, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    blocks = [{"path": f"owner/{name}", "type": "alpaca"} for name in ("one", "two")]
    content = {"base_model": str(model), "learning_rate": 1e-4, "datasets": blocks}
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    said = CliRunner().invoke(main, ["import", str(config), "-o", str(recipe), "--procs", "2"])
    assert "fill in data.sources.weight: " in said.stderr
    checked = CliRunner().invoke(main, ["check", str(recipe)])
    assert checked.exit_code == 2
    assert "weight" in checked.stderr
