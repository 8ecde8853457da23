"""Faults that the proof finds, and exports that are refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ExportError, StageError
from stages.export import proof, run
from tests.support.damage import flip
from tests.support.exports import Run


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
    monkeypatch.setattr(proof, "_fits", lambda folder: False)
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
