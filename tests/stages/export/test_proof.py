"""Faults that the proof finds, before an export is in its place and later."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from xxhash import xxh3_64_hexdigest

from pipeline.contracts.export import ExportedModel
from pipeline.errors import ExportError, StageError, UsageError
from stages.export import proof, run
from stages.export.proof import verify
from stages.export.safetensors import ExportSafetensors
from tests.support.damage import flip
from tests.support.exports import Run, run_of
from tests.support.models import FAMILIES


@pytest.mark.parametrize("position", [-1, 2000, 12])
def test_one_flipped_bit_is_found(
    position: int, llama: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_badly(folder: Path, *args: Any) -> Any:
        sums = real(folder, *args)
        flip(folder / "model.safetensors", position)
        return sums

    real = run.write
    monkeypatch.setattr(run, "write", write_badly)
    with pytest.raises(ExportError, match=r"model.safetensors .*left for inspection: .*partial"):
        llama.export()
    assert not llama.folder.exists()
    assert (llama.folder.parent / "export.partial" / "model.safetensors").is_file()
    monkeypatch.undo()
    llama.export()  # our own partial folder is no obstacle
    assert not (llama.folder.parent / "export.partial").exists()


def test_a_gpu_takes_what_host_memory_has_no_room_for(
    exported: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for a GPU."""
    folder = exported.folder
    monkeypatch.setattr(proof, "has_room", lambda size, free: False)
    meta = torch.device("meta")
    with proof.loaded(folder, (), trust_remote_code=False, device=meta) as model:
        assert {one.device for one in model.to(meta).parameters()} == {meta}
        assert not getattr(model, "hf_device_map", {})
    with proof.loaded(folder, (), trust_remote_code=False) as model:
        assert model.hf_device_map == {"": "disk"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rms_norm_eps": 10.0}, "computes something else than the trained one"),
        ({"num_hidden_layers": 1}, r"unexpected 9 tensors \(model.layers.1"),
    ],
    ids=["another number", "a layer less"],
)
def test_wrong_config_is_found(
    wrong: dict[str, Any], message: str, llama: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = llama.source.save_assets

    def save(folder: Path, *, dtype: str) -> None:
        real(folder, dtype=dtype)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | wrong))

    monkeypatch.setattr(llama.source, "save_assets", save)
    with pytest.raises(ExportError, match=message):
        llama.export()


def test_values_beyond_fp16_are_found(llama: Run) -> None:
    llama.weights.tensors["lm_head.weight"][5, 5] = 1e6
    with pytest.raises(StageError, match=r"lm_head.weight has values beyond float16"):
        llama.export(dtype="fp16")


def test_tolerance() -> None:
    expected = torch.tensor([[[1.0, -20.0]]])
    assert proof.compare(expected + 1e-4, expected) == pytest.approx(1e-4, rel=0.05)
    with pytest.raises(ExportError, match=r"differ by up to 0.0003"):
        proof.compare(expected + 3e-4, expected)
    with pytest.raises(ExportError, match=r"differ by up to nan"):
        proof.compare(expected * torch.nan, expected)
    with pytest.raises(ExportError, match=r"logits of shape"):
        proof.compare(expected[..., :1], expected)


def test_missing_unexpected_and_misshapen_weights(llama: Run) -> None:
    tensors = llama.weights.tensors
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(StageError, match=r"the checkpoint .* missing 1 tensor \(model.norm.weight"):
        llama.export()
    tensors["model.norm.weight"] = norm[:-1]
    with pytest.raises(StageError, match=r"another shape .*model.norm.weight 35 instead of 36"):
        llama.export()
    tensors |= {"model.norm.weight": norm, "stray": norm}
    with pytest.raises(StageError, match=r"unexpected 1 tensor \(stray\)"):
        llama.export()
    assert not (llama.folder.parent / "export.partial").exists()


def test_a_model_that_gives_nothing_but_zeros_is_recognised() -> None:
    zeros = torch.zeros(1, 2, 20)
    known = proof.record(torch.zeros(1, 2, dtype=torch.long), zeros, zeros).logits
    assert proof.recognise(zeros, known, torch.float32) == 0.0
    with pytest.raises(ExportError, match="computes something else"):
        proof.recognise(zeros + 1e-3, known, torch.float32)


def told(folder: Path) -> list[str]:
    lines: list[str] = []
    verify(folder, lines.append, trust_remote_code=False)
    return lines


def rename(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    save_file(tensors, file)


def reconfigure(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1.0'))


def look_again(folder: Path) -> None:
    """Verify as a resumed run does."""
    done = ExportedModel(folder=folder, files=[], total_bytes=0)
    ExportSafetensors().verify_result(done)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: flip(folder / "model.safetensors", -7), r"does not hold .* 1 tensor"),
        (
            lambda folder: os.truncate(folder / "model.safetensors", 9999),
            r"model.safetensors does not have the tensors or the size",
        ),
        (rename, r"model.safetensors does not have the tensors or the size"),
        (reconfigure, r"config.json: is not as it was written"),
        (
            lambda folder: (folder / "generation_config.json").unlink(),
            r"generation_config.json: missing",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"model.safetensors cannot be read back",
        ),
    ],
)
def test_harm_is_found(harm: Callable[[Path], None], message: str, exported: Run) -> None:
    harm(exported.folder)
    for look in (told, look_again):
        with pytest.raises(ExportError, match=message):
            look(exported.folder)


def test_a_resume_minds_no_added_file_and_no_other_model_card(exported: Run) -> None:
    (exported.folder / "README.md").write_text("# My model")
    look_again(exported.folder)
    with pytest.raises(ExportError, match=r"README.md: is not as it was written"):
        told(exported.folder)
    (exported.folder / "model.gguf").touch()
    look_again(exported.folder)
    with pytest.raises(ExportError, match=r"model.gguf is not of this export"):
        told(exported.folder)


def test_other_computation_is_found(exported: Run) -> None:
    """Every checksum agrees, but the model computes other numbers than before."""
    file = exported.folder / "export.json"
    content = json.loads(file.read_text())
    content["proof"]["logits"][3]["top"][2][1] += 0.01
    file.write_text(json.dumps(content))
    with pytest.raises(ExportError, match=r"computes something else .* up to 0.01"):
        told(exported.folder)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_of_the_hub_is_not_run_unasked(key: str, exported: Run) -> None:
    """A config can name one, which transformers would fetch; every checksum agrees."""
    folder = exported.folder
    config = json.loads((folder / "config.json").read_text()) | {key: "any/kernel"}
    (folder / "config.json").write_text(json.dumps(config))
    content = json.loads((folder / "export.json").read_text())
    content["others"]["config.json"] = xxh3_64_hexdigest((folder / "config.json").read_bytes())
    (folder / "export.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="code of the hub's kernel any/kernel would run"):
        told(folder)


def test_a_foreign_or_unfinished_folder(exported: Run, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no finished export"):
        told(tmp_path)
    file = exported.folder / "export.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"proof": None}))
    with pytest.raises(ExportError, match="no finished export"):
        told(exported.folder)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"plan": 3}))
    with pytest.raises(ExportError, match="is damaged"):
        told(exported.folder)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mixtral", "gemma2", "gpt2"])
def test_an_export_and_a_model_larger_than_memory_block_by_block(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = "bf16" if family == "gemma2" else "fp32"
    whole = run_of(FAMILIES[family], tmp_path).export(dtype=dtype, max_shard_size="20KB")
    lines = told(whole.folder)
    assert lines[0].startswith("as they were written: ")
    assert lines[0].endswith(" files other than weights")
    assert "tensors in" in lines[1]
    assert "computes what it did (largest difference 0)" in lines[2]
    if dtype == "bf16":
        return
    remembered = json.loads((whole.folder / "export.json").read_text())["proof"]
    monkeypatch.setattr(proof, "free_memory", lambda: 0)
    held: list[Any] = []
    real = AutoModelForCausalLM.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        held.append(options["device_map"])
        return real(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    run = run_of(FAMILIES[family], tmp_path / "again")
    again = run.export(dtype="fp32", max_shard_size="20KB")
    assert held == [{"": "disk"}]
    proven = json.loads((again.folder / "export.json").read_text())["proof"]
    assert proven["logits"] == remembered["logits"]
    assert "computes what it did" in told(again.folder)[-1]
    assert not list(again.folder.parent.glob(".offload-*"))
