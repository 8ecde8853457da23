"""The data slot, by files that exist: what their rows have, and what is given next to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stages.importing.support import left_out, made, outcome, slot, translated


def test_a_model_and_data_of_the_scripts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n', encoding="utf-8")
    found = translated({
        "model_name_or_path": "org/model", "model_revision": "a" * 40, "output_dir": "x",
        "train_file": str(rows), "validation_split_percentage": 5, "block_size": 64,
    })  # fmt: skip
    assert slot(found, "model") == {"use": "model.hf", "path": "org/model", "revision": "a" * 40}
    assert slot(found, "data") == {
        "use": "data.chat", "files": [str(rows)], "sequence_length": 64, "heldout_fraction": 0.05,
    }  # fmt: skip
    assert "data.loss" in found.missing
    whole = translated({"output_dir": "x", "train_file": str(rows), "completion_only_loss": False})
    assert slot(whole, "data")["loss"] == "all"
    assert "data.loss" not in whole.missing


@pytest.mark.parametrize(
    ("row", "use"),
    [('{"text": "a"}', "data.text"), ('{"prompt": "a", "completion": "b"}', "data.chat")],
)
def test_a_data_set_in_a_folder(tmp_path: Path, row: str, use: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{row}\n")
    (tmp_path / "README.md").write_text("# rows\n")
    given = {"output_dir": "x", "dataset_name": str(tmp_path), "dataset_test_split": "test"}
    found = translated(given)
    data = slot(found, "data")
    assert (data["use"], data["files"]) == (use, [f"{tmp_path}/*.jsonl"])
    assert "sources" not in data
    assert left_out(found)["dataset_test_split"] == "files are read as a whole"


def test_files_of_a_tool(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    blocks: list[dict[str, Any]] = [
        {"path": str(tmp_path / "rows.jsonl"), "type": "alpaca"},
        {"path": "json", "data_files": ["/x/one.jsonl", "/x/two.jsonl"], "type": "alpaca"},
        {"path": str(tmp_path / "folder"), "type": "alpaca", "ds_type": "json"},
    ]
    held = [{"path": "/x/held.jsonl", "type": "alpaca"}]
    said = {"base_model": "a/b", "datasets": blocks, "test_datasets": held, "val_set_size": 0}
    found = made("axolotl", said)
    assert slot(found, "data")["files"] == [
        f"{tmp_path}/rows.jsonl", "/x/one.jsonl", "/x/two.jsonl", f"{tmp_path}/folder/*",
    ]  # fmt: skip
    assert slot(found, "data")["heldout_files"] == ["/x/held.jsonl"]
    assert left_out(found) == {}


@pytest.mark.parametrize(
    ("tool", "key", "more"),
    [
        ("axolotl", "datasets[0].path",
         {"heldout_fraction": 0.1, "sequence_length": 2048, "documents_apart": True}),
        ("llama_factory", "dataset", {"sequence_length": 2048}),
    ],
)  # fmt: skip
def test_data_is_replaced_by_the_command_line(
    tmp_path: Path, tool: str, key: str, more: dict[str, Any]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c", encoding="utf-8")
    options = {"--data": [str(text)], "--model": "org/other", "--procs": 1}
    found = made(tool, {"=": f"{tool}/lora.yaml", **options})
    assert slot(found, "data") == {"use": "data.text", "files": [str(text)], **more}
    assert outcome(found, key).why == "--data replaces it"
    assert slot(found, "model")["path"] == "org/other"


def test_data_sets_without_their_file() -> None:
    base = {"model_name_or_path": "org/model", "finetuning_type": "full", "output_dir": "x"}
    online = made("llama_factory", {"dataset": "owner/rows", "dataset_dir": "ONLINE"}, base)
    assert slot(online, "data")["sources"] == [{"dataset": "owner/rows"}]
    inline = {"dataset": "identity", "dataset_dir": {"identity": {"file_name": "i.json"}}}
    found = made("llama_factory", inline, base)
    assert slot(found, "data")["files"] == [str(Path("data", "i.json").absolute())]
