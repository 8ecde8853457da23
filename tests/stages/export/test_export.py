"""Exports: round trips, proof, and what happens to the target folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from pipeline.artifacts import ExportedModel, ModelSource
from pipeline.errors import ExportError, StageError
from stages.export import proof, steps
from stages.export.safetensors import ExportSafetensors
from stages.model.hf import HfModel
from tests.support.models import (
    FAMILIES,
    context,
    filled,
    logits,
    random_source,
    save_tokenizer,
    tiny_llama_config,
    token_ids,
)
from tests.support.weights import MemoryWeights, trained


class Run(NamedTuple):
    """A trained model, ready to be exported to `folder`."""

    folder: Path
    source: ModelSource
    weights: MemoryWeights

    def export(self, **fields: Any) -> ExportedModel:
        stage = ExportSafetensors(folder=str(self.folder), **fields)
        return stage.run(context(self.folder.parent), self.weights, self.source)


def run_of(config: dict[str, Any], tmp_path: Path) -> Run:
    source = random_source(config, tmp_path)
    return Run(tmp_path / "export", source, trained(source))


@pytest.fixture
def llama(tmp_path: Path) -> Run:
    return run_of(tiny_llama_config(), tmp_path)


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the weight files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_round_trip_is_exact(family: str, size: str, tmp_path: Path) -> None:
    run = run_of(FAMILIES[family], tmp_path)
    done = run.export(dtype="fp32", max_shard_size=size)
    reference = filled(run.source, run.weights)
    attention = reference.config._attn_implementation
    model = load(done.folder, attn_implementation=attention)
    assert torch.equal(logits(model), logits(reference))
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


def test_exported_model_generates(tmp_path: Path) -> None:
    run = run_of(tiny_llama_config(), tmp_path)
    model = load(run.export(dtype="fp32").folder)
    reference = filled(run.source, run.weights)
    kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(token_ids())
    found = model.generate(token_ids(), attention_mask=mask, **kwargs)
    assert torch.equal(found, reference.generate(token_ids(), attention_mask=mask, **kwargs))
    assert found.shape[1] > token_ids().shape[1]


def test_tokenizer_and_card_come_along(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words")
    stage = HfModel(config=tiny_llama_config(), tokenizer=str(tmp_path / "words"))
    source = stage.run(context(tmp_path, seed=7))
    done = Run(tmp_path / "export", source, trained(source)).export(prompt="a b c")
    assert {"tokenizer.json", "chat_template.jinja", "README.md"} <= set(done.files)
    card = (done.folder / "README.md").read_text()
    assert "- architecture: LlamaForCausalLM\n" in card


def test_export_of_an_export(llama: Run, tmp_path: Path) -> None:
    first = llama.export(dtype="fp32")
    source = HfModel(path=str(first.folder)).run(context(tmp_path))
    again = Run(tmp_path / "again", source, llama.weights).export(dtype="fp32")
    one, other = (folder / "model.safetensors" for folder in (first.folder, again.folder))
    assert one.read_bytes() == other.read_bytes()


def test_default_folder_and_record(llama: Run, tmp_path: Path) -> None:
    done = ExportSafetensors().run(context(tmp_path), llama.weights, llama.source)
    assert done.folder == tmp_path / "export"
    assert ExportedModel.restore(done.record()) == done


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("position", [-1, 2000, 12])
def test_one_flipped_bit_is_found(
    position: int, llama: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_badly(folder: Path, *args: Any) -> Any:
        digests = real(folder, *args)
        flip(folder / "model.safetensors", position)
        return digests

    real = steps.write
    monkeypatch.setattr(steps, "write", write_badly)
    with pytest.raises(ExportError, match=r"model.safetensors .*left for inspection: .*partial"):
        llama.export()
    assert not llama.folder.exists()
    assert (llama.folder.parent / "export.partial" / "model.safetensors").is_file()
    monkeypatch.undo()
    llama.export()  # a partial folder of ours is no obstacle
    assert not (llama.folder.parent / "export.partial").exists()


def test_wrong_config_is_found(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llama.source.save_assets

    def save(folder: Path, *, dtype: str) -> None:
        real(folder, dtype=dtype)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 10.0}))

    monkeypatch.setattr(llama.source, "save_assets", save)
    with pytest.raises(ExportError, match="computes something else than the trained one"):
        llama.export()


def test_config_without_a_layer_is_found(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llama.source.save_assets

    def save(folder: Path, *, dtype: str) -> None:
        real(folder, dtype=dtype)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))

    monkeypatch.setattr(llama.source, "save_assets", save)
    with pytest.raises(ExportError, match=r"unexpected 9 tensors \(model.layers.1"):
        llama.export()


def test_values_beyond_fp16_are_found(llama: Run) -> None:
    llama.weights.tensors["lm_head.weight"][5, 5] = 1e6
    with pytest.raises(ExportError, match="not finite"):
        llama.export(dtype="fp16")


def test_tolerance() -> None:
    expected = torch.tensor([[[1.0, -20.0]]])
    assert proof._compare(expected + 1e-4, expected) == pytest.approx(1e-4, rel=0.05)
    with pytest.raises(ExportError, match=r"differ by up to 0.0003"):
        proof._compare(expected + 3e-4, expected)
    with pytest.raises(ExportError, match=r"logits of shape"):
        proof._compare(expected[..., :1], expected)


def test_missing_unexpected_and_misshapen_weights(llama: Run) -> None:
    tensors = llama.weights.tensors
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(StageError, match=r"the checkpoint .* missing 1 tensor \(model.norm.weight"):
        llama.export()
    tensors["model.norm.weight"] = norm[:-1]
    with pytest.raises(StageError, match=r"model.norm.weight has shape \(35,\)"):
        llama.export()
    tensors |= {"model.norm.weight": norm, "stray": norm}
    with pytest.raises(StageError, match=r"unexpected 1 tensor \(stray\)"):
        llama.export()
    assert not (llama.folder.parent / "export.partial").exists()


def test_foreign_files_are_left_alone(llama: Run, tmp_path: Path) -> None:
    llama.folder.mkdir()
    (llama.folder / "thesis.tex").write_text("x")
    with pytest.raises(StageError, match="holds files that are not an export of ours"):
        llama.export()
    assert (llama.folder / "thesis.tex").read_text() == "x"
    problems = list(ExportSafetensors(folder=str(llama.folder)).check(None))  # type: ignore[arg-type]
    assert [problem.key for problem in problems] == ["folder"]


def test_another_model_s_folder_is_left_alone(llama: Run) -> None:
    filled(llama.source).save_pretrained(llama.folder)
    with pytest.raises(StageError, match="not an export of ours"):
        llama.export()


def test_file_added_to_an_export_is_left_alone(llama: Run) -> None:
    llama.export()
    (llama.folder / "eval.json").write_text("{}")
    with pytest.raises(StageError, match=r"its export did not write: eval.json"):
        llama.export()
    assert (llama.folder / "eval.json").is_file()


def test_earlier_export_is_replaced_only_by_a_proven_one(
    llama: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.export(dtype="fp32", max_shard_size="20KB")
    before = stored(llama.folder)
    llama.weights.tensors["model.norm.weight"] += 1

    def fail(*args: Any) -> None:
        raise ExportError("no")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "prove_model", fail)
        with pytest.raises(ExportError):
            llama.export(dtype="fp32")
    assert torch.equal(stored(llama.folder)["model.norm.weight"], before["model.norm.weight"])
    llama.export(dtype="fp32")
    after = stored(llama.folder)["model.norm.weight"]
    assert torch.equal(after, before["model.norm.weight"] + 1)
    assert not list(llama.folder.glob("model-*"))
    assert [entry.name for entry in llama.folder.parent.iterdir()] == ["export"]


def test_crash_between_the_renames_is_healed(llama: Run) -> None:
    llama.export()
    previous = llama.folder.with_name("export.previous")
    shutil.move(llama.folder, previous)
    llama.export()
    assert llama.folder.is_dir()
    assert not previous.exists()


def test_full_disk(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(llama.folder.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StageError, match=r"16\.\d MB needed, 1.0 KB available"):
        llama.export()


def test_write_error(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stages.export.writer.os.fsync", fail)
    with pytest.raises(StageError, match="cannot write the export .* No space left"):
        llama.export()
