"""Exports contain the trained weights under the names that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.contracts.export import ExportedModel
from pipeline.testing import plan_view, problems
from stages.export import contents
from stages.export.safetensors import ExportSafetensors, parse_size
from stages.export.target import Proof
from stages.model.hf import HfModel
from tests.support.exports import Run, run_of, stored
from tests.support.models import (
    FAMILIES,
    context,
    filled,
    logits,
    save_tokenizer,
    tiny_llama_config,
    token_ids,
)
from tests.support.weights import MemoryWeights, trained


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_round_trip_is_exact(family: str, tmp_path: Path) -> None:
    run = run_of(FAMILIES[family], tmp_path)
    reference = filled(run.source, run.weights)
    attention = reference.config._attn_implementation
    expected = logits(reference)
    for size in ("5GB", "20KB"):
        done = run._replace(folder=tmp_path / size).export(dtype="fp32", max_shard_size=size)
        model = load(done.folder, attn_implementation=attention)
        assert torch.equal(logits(model), expected)
        assert model.config.architectures == [type(reference).__name__]
        assert type(model) is type(reference)
        shards = [name for name in done.files if name.startswith("model-")]
        assert (len(shards) > 1) == (size == "20KB")


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_low_precision_is_the_cast(
    dtype: Any, torch_dtype: torch.dtype, llama: Run, tmp_path: Path
) -> None:
    done = llama.export(dtype=dtype)
    tensors = stored(done.folder)
    assert tensors.keys() == llama.weights.tensors.keys()
    for name, tensor in llama.weights.tensors.items():
        assert torch.equal(tensors[name], tensor.to(torch_dtype)), name
    assert json.loads((done.folder / "config.json").read_text())["dtype"] == str(
        torch_dtype
    ).removeprefix("torch.")


@pytest.mark.parametrize("alias", ["lm_head.weight", "model.embed_tokens.weight", None])
def test_tied_weights_are_written_once(alias: str | None, tmp_path: Path) -> None:
    run = run_of(FAMILIES["llama_tied"], tmp_path)
    reference = filled(run.source, run.weights)
    if alias is not None:  # the checkpoint lists the shared tensor under one name only
        other = {"lm_head.weight", "model.embed_tokens.weight"} - {alias}
        del run.weights.tensors[other.pop()]
    done = run.export(dtype="fp32")
    assert "model.embed_tokens.weight" in stored(done.folder)
    assert "lm_head.weight" not in stored(done.folder)
    assert torch.equal(logits(load(done.folder)), logits(reference))


def test_experts_are_written_as_the_hub_has_them(tmp_path: Path) -> None:
    run = run_of(FAMILIES["mixtral"], tmp_path)
    tensors = stored(run.export(dtype="fp32").folder)
    fused = run.weights.tensors["model.layers.1.mlp.experts.gate_up_proj"]
    parts = [
        tensors[f"model.layers.1.block_sparse_moe.experts.2.{one}.weight"] for one in ("w1", "w3")
    ]
    assert torch.equal(torch.cat(parts), fused[2])
    assert "model.layers.1.mlp.experts.gate_up_proj" not in tensors


def test_each_tensor_is_read_once_to_write_and_once_to_prove(llama: Run) -> None:
    llama.export()
    assert len(llama.weights.reads) == 2 * len(llama.weights.tensors)


def test_index_and_sizes(llama: Run) -> None:
    done = llama.export(dtype="fp32", max_shard_size="20KB")
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    tensors = llama.weights.tensors
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert sorted(entry.name for entry in done.folder.iterdir()) == list(done.files)
    files = done.folder.glob("*.safetensors")
    assert done.total_bytes == sum(file.stat().st_size for file in files)


def test_exported_model_generates(exported: Run) -> None:
    model, reference = load(exported.folder), filled(exported.source, exported.weights)
    kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(token_ids())
    found = model.generate(token_ids(), attention_mask=mask, **kwargs)
    assert torch.equal(found, reference.generate(token_ids(), attention_mask=mask, **kwargs))
    assert found.shape[1] > token_ids().shape[1]


@pytest.mark.parametrize("chat", [True, False])
def test_the_card_s_python_answers(
    chat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(tmp_path / "words")
    if not chat:
        (tmp_path / "words/chat_template.jinja").unlink()
    stage = HfModel(config=tiny_llama_config(), tokenizer=str(tmp_path / "words"))
    source = stage.run(context(tmp_path, seed=7))
    done = Run(tmp_path / "export", source, trained(source)).export(prompt="a b c")
    files = {"tokenizer.json", "README.md", *(["chat_template.jinja"] if chat else [])}
    assert files <= set(done.files)
    card = (done.folder / "README.md").read_text()
    assert "- architecture: LlamaForCausalLM\n" in card
    assert "`pipe verify` checks again that the files are intact" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    assert ("apply_chat_template" in code) is chat
    made: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(done.folder)), made)
    assert made["tokenizer"].get_vocab() == source.tokenizer().get_vocab()
    assert type(made["model"]).__name__ == "LlamaForCausalLM"
    assert capsys.readouterr().out.endswith("\n")


def test_export_of_an_export(exported: Run, tmp_path: Path) -> None:
    source = HfModel(path=str(exported.folder)).run(context(tmp_path))
    again = Run(tmp_path / "again", source, exported.weights).export(dtype="fp32")
    one, other = (folder / "model.safetensors" for folder in (exported.folder, again.folder))
    assert one.read_bytes() == other.read_bytes()


def test_default_folder_and_record(llama: Run, tmp_path: Path) -> None:
    done = ExportSafetensors().run(context(tmp_path), llama.weights, llama.source)
    assert done.folder == tmp_path / "export"
    assert ExportedModel.restore(done.record()) == done


def test_writing_never_holds_a_tensor(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watched(MemoryWeights):
        def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
            sizes.append(out.numel() * out.element_size())
            super().read_into(name, start, out)

        def read(self, name: str) -> torch.Tensor:
            raise AssertionError(name)

    monkeypatch.setattr("stages.export.weight_files.PIECE", 512)
    monkeypatch.setattr(
        contents.ModelContents, "prove", lambda *args: Proof(prompt=[], logits=[], difference=0)
    )
    llama._replace(weights=Watched(llama.weights.tensors)).export(dtype="fp32")
    assert sum(sizes) == sum(t.numel() * 4 for t in llama.weights.tensors.values())
    assert max(sizes) == 512


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000),
        ("512MiB", 512 << 20),
        ("1.5 kb", 1500),
        ("7B", 7),
        (" 2 TiB ", 2 << 40),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "5 gigs", "1e3MB", "5GBs"])
def test_no_size(text: str) -> None:
    (problem,) = problems(ExportSafetensors, {"max_shard_size": text})
    assert problem.key == "max_shard_size"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": " "}, "must not be empty"),
        ({"folder": "out.partial"}, "`out.partial` is the name of an unfinished export"),
    ],
)
def test_mistakes(fields: dict[str, str], words: str) -> None:
    (problem,) = ExportSafetensors(**fields).check(plan_view())  # type: ignore[arg-type]
    assert problem.key == next(iter(fields))
    assert words in problem.message
