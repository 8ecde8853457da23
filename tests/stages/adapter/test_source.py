"""Adapted models: initial values, merged weights, exports, and adapters of peft."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.contracts.data import Data
from pipeline.contracts.training import Progress, TrainedRun
from pipeline.errors import ResumeRefused, StageError
from stages.adapter.lora import Lora
from stages.adapter.source import row_blocks
from stages.export.safetensors import ExportAdapter, ExportSafetensors
from stages.model.hf import ActivationCheckpointing, Fp8, HfModel
from stages.train.causal_lm import TrainCausalLm
from stages.train.checks import lineage, require_same_lineage
from stages.weights.views import MemoryReader
from tests.support.adapters import adapted, base_of, logits, module_with, saved_by_peft, trained
from tests.support.models import context
from tests.support.runs import TINY
from tests.support.tier import FULL
from tests.support.weights import MemoryWeights

GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 12, "n_layer": 2, "n_head": 2,
        "n_positions": 32}  # fmt: skip
UNTIED = {**TINY, "tie_word_embeddings": False}
CASES = {
    "lora": (TINY, {"rank": 4, "alpha": 8.0}),
    "rslora": (TINY, {"rank": 4, "scaling": "rslora", "targets": ("q_proj", "mlp.up_proj")}),
    "dora": (UNTIED, {"rank": 3, "dora": True}),
    "and a head": (UNTIED, {"rank": 2, "targets": ("v_proj",), "train_also": ("lm_head.*",)}),
    "transposed": (GPT2, {"rank": 4, "targets": ("c_attn", "c_fc")}),
}
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def close(found: Any, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(logits(found), expected, rtol=0, atol=atol)


def merged_by_export(folder: Path, weights: Any, source: Any) -> Any:
    done = ExportSafetensors(dtype="fp32").run(context(folder), weights, source)
    return AutoModelForCausalLM.from_pretrained(done.folder).eval()


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_computes_the_same_fresh_trained_merged_and_in_peft(
    name: str, tmp_path: Path
) -> None:
    config, fields = CASES[name]
    source = adapted(tmp_path, config, **fields)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    close(module_with(source, MemoryWeights({})), logits(plain), 2e-6)
    weights = trained(source)
    expected = logits(module_with(source, weights))
    assert (logits(plain) - expected).abs().max() > 1e-2
    close(merged_by_export(tmp_path, weights, source), expected, 2e-5)
    done = ExportAdapter(folder=str(tmp_path / "adapter")).run(context(tmp_path), weights, source)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder).eval()
    close(loaded, expected, 2e-6)
    told: list[str] = []
    ExportAdapter.verify(done.folder, told.append, trust_remote_code=False)
    assert "as they were written" in told[-2]
    total = sum(tensor.numel() for tensor in weights.tensors.values())
    assert done.total_bytes < 4 * total + 8192
    if name == "dora":  # the merge is peft's own
        ours = source.merge_trained(weights)
        for key, tensor in loaded.merge_and_unload().state_dict().items():
            torch.testing.assert_close(ours.read(key), tensor, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("stage", [ExportSafetensors(dtype="fp32"), ExportAdapter()])
def test_what_training_does_to_the_module_is_no_part_of_the_proof(
    stage: Any, tmp_path: Path
) -> None:
    base = base_of({**UNTIED, "hidden_size": 32, "intermediate_size": 48}, tmp_path)
    training = HfModel(
        path=str(base), fp8=Fp8(emulate=True), activation_checkpointing=ActivationCheckpointing()
    )
    source = Lora(rank=4).run(context(tmp_path), training.run(context(tmp_path)))
    weights = trained(source)
    assert stage.run(context(tmp_path), weights, source).total_bytes
    rounded, exact = module_with(source, weights), module_with(source.inference_view, weights)
    assert (logits(rounded) - logits(exact)).abs().max() > 1e-3


def test_a_range_of_a_merged_weight_is_that_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.adapter.source.CHUNK", 7 * 4 * 24)  # seven rows
    source = adapted(tmp_path, UNTIED, rank=3, dora=True)
    merged = source.merge_trained(trained(source))
    name = "model.layers.1.mlp.up_proj.weight"
    whole = merged.read(name).view(-1)
    for start, stop in ((0, 1), (13, 14), (5, 400), (167, 169), (860, 888), (0, 888)):
        assert torch.equal(torch.cat(list(merged.chunks(name, start, stop))), whole[start:stop])


def test_row_blocks_do_not_depend_on_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.adapter.source.CHUNK", 4 * 4 * 10)
    values = torch.arange(150.0).view(15, 10)

    def blocks(start: int, stop: int) -> list[tuple[int, int]]:
        found = list(row_blocks(MemoryReader({"w": values}), "w", 4, 11, start, stop))
        assert all(torch.equal(rows, values[4 + top :][: len(rows)]) for top, rows in found)
        return [(top, top + len(rows)) for top, rows in found]

    assert blocks(0, 110) == [(0, 4), (4, 8), (8, 11)]
    assert blocks(45, 81) == [(4, 8), (8, 11)]
    assert blocks(39, 40) == [(0, 4)]


def test_an_adapter_goes_on_from_a_saved_one(tmp_path: Path) -> None:
    source = adapted(tmp_path, TINY, rank=4)
    weights = trained(source)
    done = ExportAdapter().run(context(tmp_path), weights, source)
    again = Lora(rank=4, start_from=str(done.folder)).run(context(tmp_path), source.base)
    reader = again.weights()
    for name, tensor in weights.tensors.items():
        assert torch.equal(reader.read(name), tensor)
    other = Lora(rank=4, targets=("q_proj",), start_from=str(done.folder))
    with pytest.raises(StageError, match=r"is not of this model and these settings: unexpected 36"):
        other.run(context(tmp_path), source.base).weights()
    narrow = adapted(tmp_path, {**TINY, "hidden_size": 16}, rank=4, start_from=str(done.folder))
    with pytest.raises(StageError, match=r"has shape \[4, 24\] instead of \[4, 16\]"):
        narrow.weights()


OF_PEFT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{name: (config, fields, {}) for name, (config, fields) in CASES.items()},
    "and a head": (*CASES["and a head"], {"modules_to_save": ["lm_head"]}),
    "of a head": (UNTIED, {"rank": 2, "targets": ("lm_head", "q_proj")}, {}),
    "and biases": (
        {**UNTIED, "model_type": "qwen2"},
        {"rank": 2, "targets": ("q_proj",), "train_also": ("*.q_proj.bias",)},
        {"bias": "lora_only"},
    ),
    "in 4 bits": (UNTIED, {"rank": 2, "quantize": "nf4", "dora": True}, {}),
}  # fmt: skip
"""An architecture, fields of the training, and further fields of peft's configuration."""


@pytest.mark.parametrize(
    "name", [name for name in OF_PEFT if FULL or name not in ("lora", "rslora", "dora")]
)
def test_an_adapter_of_peft_is_read_and_written_as_peft_does(name: str, tmp_path: Path) -> None:
    config, fields, more = OF_PEFT[name]
    fresh = adapted(tmp_path, config, **fields)
    folder, model = saved_by_peft(tmp_path / "base", fresh, more)
    base = fresh.base.base if fresh.stage.quantize else fresh.base
    source = Lora(**fields, start_from=str(folder)).run(context(tmp_path), base)
    close(module_with(source, MemoryWeights({})), logits(model), 2e-5)
    if "bias" in more:
        return  # export.adapter cannot express it
    reader = source.weights()
    weights = MemoryWeights({name: reader.read(name) for name in source.trained})
    done = ExportAdapter().run(context(tmp_path), weights, source)
    ours, theirs = load_file(done.folder / FILE), load_file(folder / FILE)
    assert ours.keys() == {name for name in theirs if ".base_layer." not in name}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_an_adapter_that_we_wrote_under_other_names_still_loads(tmp_path: Path) -> None:
    config, fields = CASES["dora"]
    source = adapted(tmp_path, config, **fields)
    weights = trained(source)
    done = ExportAdapter().run(context(tmp_path), weights, source)
    suffix = ".lora_magnitude_vector"
    before = {
        f"{name}.weight" if name.endswith(suffix) else name: tensor
        for name, tensor in load_file(done.folder / FILE).items()
    }
    assert any(name.endswith(f"{suffix}.weight") for name in before)
    save_file(before, done.folder / FILE)
    again = Lora(**fields, start_from=str(done.folder)).run(context(tmp_path), source.base)
    reader = again.weights()
    assert all(torch.equal(reader.read(n), tensor) for n, tensor in weights.tensors.items())


def test_what_is_borrowed_is_all_that_is_not_trained(tmp_path: Path) -> None:
    source = adapted(tmp_path, UNTIED, rank=2, train_also=("*norm.weight",))
    names = {name for name, _ in source.outline.named_parameters()}
    assert set(source.frozen_base) | set(source.trained) == names
    assert "model.norm.weight" in source.trained
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in source.frozen_base


def test_the_file_is_as_peft_would_write_it(tmp_path: Path) -> None:
    source = adapted(tmp_path, TINY, rank=2, targets=("q_proj",))
    done = ExportAdapter(dtype="bf16").run(context(tmp_path), trained(source), source)
    tensors = load_file(done.folder / FILE)
    assert set(tensors) == {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
        for layer in range(3)
        for part in "AB"
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((done.folder / CONFIG).read_text())
    assert config["target_modules"] == ["q_proj"]
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 32.0, "LORA")


def lineage_of(source: Any, folder: Path) -> dict[str, Any]:
    data = Data(train=[], heldout=None, pad_id=0, packed=False, identity={})  # type: ignore[arg-type]
    return lineage(TrainCausalLm(steps=1, global_batch_size=1), context(folder), data, source)


def test_an_altered_base_is_neither_trained_on_nor_exported(tmp_path: Path) -> None:
    """One bit in the middle of the only file has changed; its size and times have not."""
    source = adapted(tmp_path, UNTIED, rank=2)
    began = lineage_of(source, tmp_path)
    weights, done = trained(source), TrainedRun(checkpoint="", progress=Progress(lineage=began))
    stage, file = ExportSafetensors(dtype="fp32"), tmp_path / "base/model.safetensors"
    assert stage.run(context(tmp_path), weights, source, done).total_bytes
    times, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    base = HfModel(path=str(tmp_path / "base")).run(context(tmp_path))
    again = Lora(rank=2).run(context(tmp_path), base)
    with pytest.raises(ResumeRefused, match=r"weights was \w+, is \w+ .*--accept weights"):
        require_same_lineage(lineage_of(again, tmp_path), (), done.progress)
    with pytest.raises(StageError, match="are not those that were trained on"):
        stage.run(context(tmp_path), weights, again, done)
    with pytest.raises(StageError, match=r"\(put back the files, or name the export\)"):
        stage.open_trained(context(tmp_path), weights, again, done)
    accepted = dataclasses.replace(context(tmp_path), accept=frozenset({"weights"}))
    assert stage.run(accepted, weights, again, done).total_bytes
    # Without an adapter a checkpoint has all weights.
    assert lineage_of(again.base, tmp_path)["weights"] is None


QWEN = {**UNTIED, "model_type": "qwen2"}
OUTSIDE = {"model_type": "opt", "vocab_size": 101, "hidden_size": 24, "ffn_dim": 32,
           "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 16,
           "max_position_embeddings": 64}  # fmt: skip
MIXTRAL = {**UNTIED, "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48,
           "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        pytest.param(QWEN, {"train_also": ("*.bias",)}, id="biases of adapted layers"),
        pytest.param(OUTSIDE, {"dora": True}, id="dora outside of blocks"),
        pytest.param(MIXTRAL, {"dora": True}, id="next to experts"),
    ],
)
def test_other_architectures(
    config: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    source = adapted(tmp_path, config, rank=2, **fields)
    weights = trained(source)
    expected = logits(module_with(source, weights))
    close(merged_by_export(tmp_path, weights, source), expected, 2e-5)
    if "train_also" not in fields:
        stage = ExportAdapter(folder=str(tmp_path / "alone"))
        stage.run(context(tmp_path), weights, source)


def test_an_adapter_cannot_hold_a_module_in_part(tmp_path: Path) -> None:
    source = adapted(tmp_path, TINY, rank=2, train_also=("model.embed_tokens.weight",))
    with pytest.raises(StageError, match=r"embed_tokens: an adapter cannot express"):
        ExportAdapter().run(context(tmp_path), trained(source), source)
