"""`verify` finds every change of an export since its proof."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from xxhash import xxh3_64_hexdigest

from pipeline.contracts.export import ExportedModel
from pipeline.errors import ExportError, UsageError
from stages.export import proof as running
from stages.export.proof import verify
from stages.export.safetensors import ExportSafetensors
from tests.support.exports import Run, run_of
from tests.support.models import FAMILIES


def told(folder: Path) -> list[str]:
    lines: list[str] = []
    verify(folder, lines.append, trust_remote_code=False)
    return lines


def flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)


def shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def rename(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    save_file(tensors, file)


def reconfigure(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1.0'))


def lose(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


def lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def look_again(folder: Path) -> None:
    """Verify as a resumed run does."""
    done = ExportedModel(folder=folder, files=[], total_bytes=0)
    ExportSafetensors().verify_result(done)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip, r"does not hold .* 1 tensor"),
        (shorten, r"model.safetensors does not have the tensors or the size"),
        (rename, r"model.safetensors does not have the tensors or the size"),
        (reconfigure, r"config.json: is not as it was written"),
        (lose, r"generation_config.json: missing"),
        (lose_weights, r"model.safetensors cannot be read back"),
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
    monkeypatch.setattr(running, "free_memory", lambda: 0)
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
