"""An export holds what the training did not read, byte for byte, and loads as the source did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import ExportError
from stages.export.proof import verify
from stages.export.safetensors import ExportSafetensors
from stages.model.hf import HfModel
from tests.support.exports import stored
from tests.support.models import FAMILIES, context, filled, random_source
from tests.support.multimodal import CONFIGS, saved, whole_source
from tests.support.tier import spread
from tests.support.weights import MemoryWeights, trained

MTP = {"mtp.fc.weight": torch.arange(20).view(4, 5).half(), "mtp.norm.weight": torch.ones(3)}


def exported(folder: Path, **fields: Any) -> Path:
    """Export a changed model of `folder` in bf16; return the export's folder."""
    ctx, out = context(folder), folder / "out"
    source = HfModel(path=str(folder), **fields).run(ctx)
    ExportSafetensors(folder=str(out)).run(ctx, trained(source), source)
    return out


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", spread(list(CONFIGS), 3))
def test_an_export_loads_under_the_class_of_its_source(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    whole = saved(kind, tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    out = exported(tmp_path)
    after = stored(out)
    assert after.keys() == before.keys()
    passed = set(json.loads((out / "export.json").read_text())["passed"])
    assert passed
    for name, tensor in before.items():
        if name in passed:
            assert after[name].dtype == torch.float32
            assert torch.equal(after[name], tensor)
        else:
            assert after[name].dtype == torch.bfloat16
            assert not torch.equal(after[name].float(), tensor)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [type(whole).__name__]
    processor = "preprocessor_config.json"
    assert (out / processor).read_bytes() == (tmp_path / processor).read_bytes()
    assert "AutoModelForImageTextToText.from_pretrained" in (out / "README.md").read_text()
    model, info = AutoModelForImageTextToText.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert type(model) is type(whole)
    assert not info["missing_keys"]
    own, theirs = dict(model.named_parameters()), dict(whole.named_parameters())
    tower = [name for name in theirs if "vis" in name and "language_model" not in name]
    assert tower
    assert all(torch.equal(own[name], theirs[name]) for name in tower)


def verified(folder: Path) -> str:
    """Verify an export; return the last line that is reported."""
    lines: list[str] = []
    verify(folder, lines.append, trust_remote_code=False)
    return lines[-1]


def test_tensors_of_no_part_of_the_class_are_passed_through(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path)
    add(tmp_path, MTP)
    out = exported(tmp_path, unused_weights={"mtp.*": "pass_through"})
    after = stored(out)
    for name, tensor in MTP.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)
    assert "the model computes what it did" in verified(out)


def test_a_text_model_passes_on_what_it_does_not_know(tmp_path: Path) -> None:
    filled(random_source(FAMILIES["llama"], tmp_path)).save_pretrained(tmp_path)
    add(tmp_path, MTP)
    out = exported(tmp_path, unused_weights={"mtp.fc.*": "pass_through", "mtp.*": "drop"})
    assert torch.equal(stored(out)["mtp.fc.weight"], MTP["mtp.fc.weight"])
    assert "mtp.norm.weight" not in stored(out)
    assert "the model computes what it did" in verified(out)


def test_damage_to_what_was_passed_through_is_found(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    out = exported(tmp_path)
    name = next(one for one in stored(out) if one.startswith("vision_tower"))
    file = out / "model.safetensors"
    content = bytearray(file.read_bytes())
    place = content.find(stored(out)[name].numpy().tobytes())
    assert place > 0
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(ExportError, match=name):
        verified(out)


TOWERS = {
    "gemma3": ("model.vision_tower.*", "model.multi_modal_projector.*"),
    "qwen2_5_vl": ("model.visual.*",),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_a_frozen_tower_of_the_module_is_exported_as_it_was(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path, torch.bfloat16)
    ctx, out = context(tmp_path), tmp_path / "out"
    source = whole_source(ctx, path=str(tmp_path), frozen=TOWERS[kind])
    kept = {n: t for n, t in trained(source).tensors.items() if n not in source.frozen_base}
    ExportSafetensors(folder=str(out)).run(ctx, MemoryWeights(kept), source)
    before, after = load_file(tmp_path / "model.safetensors"), stored(out)
    assert after.keys() == before.keys()
    assert json.loads((out / "export.json").read_text())["passed"] == []
    same = {name for name in before if torch.equal(after[name], before[name])}
    parts = ("visual.", "vision_tower.", "multi_modal_projector.")
    assert same == {name for name in before if any(part in name for part in parts)}
    assert same
    assert "the model computes what it did" in verified(out)


def test_frozen_text_next_to_a_tower_that_is_passed_through(tmp_path: Path) -> None:
    saved("gemma3", tmp_path)
    source = HfModel(path=str(tmp_path), frozen=("*.layers.0.*",)).run(context(tmp_path))
    kept = {n: t for n, t in trained(source).tensors.items() if n not in source.frozen_base}
    ctx, out = context(tmp_path), tmp_path / "out"
    ExportSafetensors(folder=str(out), dtype="fp32").run(ctx, MemoryWeights(kept), source)
    before, after = load_file(tmp_path / "model.safetensors"), stored(out)
    assert after.keys() == before.keys()
    passed = json.loads((out / "export.json").read_text())["passed"]
    frozen = {name for name in before if "language_model" in name and ".layers.0." in name}
    same = {name for name in before if torch.equal(after[name], before[name])}
    assert passed
    assert frozen
    assert same == {*passed, *frozen}
