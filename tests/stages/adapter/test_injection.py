"""Updates of experts that are stacked in one tensor: numbers, files that peft reads, warnings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.adapter.compat import quiet
from stages.adapter.lora import Lora
from stages.export.safetensors import ExportAdapter, ExportSafetensors
from stages.model.hf import HfModel
from tests.support.adapters import adapted, logits, module_with, saved_by_peft, trained
from tests.support.models import context
from tests.support.moe import MOE
from tests.support.runs import TINY
from tests.support.tier import spread
from tests.support.weights import MemoryWeights

SHAPES = {
    "gate_up_proj": {"lora_A": (5, 3, 24), "lora_B": (5, 32, 3)},
    "down_proj": {"lora_A": (5, 3, 16), "lora_B": (5, 24, 3)},
}
FIELDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3},
    "rslora": {"rank": 8, "scaling": "rslora"},
    "some": {"rank": 3, "targets": ("q_proj",), "target_parameters": ("experts.down_proj",)},
    "alone": {"rank": 3, "targets": (), "target_parameters": ("gate_up_proj", "down_proj")},
    "with dropout": {"rank": 3, "dropout": 0.5},
    "and the router": {"rank": 3, "train_also": ("*.mlp.gate.*",)},
}
CASES = [
    *((kind, "all") for kind in spread(list(MOE), 2)),
    *(("qwen3_moe", name) for name in FIELDS if name != "all"),
]


def test_every_expert_has_factors(tmp_path: Path) -> None:
    source = adapted(tmp_path, MOE["qwen3_moe"], rank=3)
    shapes = {name: tuple(one.shape) for name, one in source.outline.named_parameters()}
    for leaf, parts in SHAPES.items():
        for part, shape in parts.items():
            assert shapes[f"model.layers.1.mlp.experts.{part}.{leaf}"] == shape
    assert {layer.nested for layer in source.layers if layer.name.endswith("down_proj")} == {0}


@pytest.mark.parametrize(("kind", "name"), spread(CASES, 5))
def test_peft_reads_and_merges_what_is_exported(kind: str, name: str, tmp_path: Path) -> None:
    source = adapted(tmp_path, MOE[kind], **FIELDS[name])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    fresh = logits(module_with(source, MemoryWeights({})))
    torch.testing.assert_close(fresh, logits(plain), rtol=0, atol=2e-6)
    weights = trained(source)
    expected = logits(module_with(source, weights))
    assert (expected - fresh).abs().max() > 1e-2
    done = ExportAdapter().run(context(tmp_path), weights, source)
    with quiet():
        loaded = peft.PeftModel.from_pretrained(plain, done.folder).eval()
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    ours = source.merge_trained(weights)
    for key, tensor in merged.state_dict().items():
        torch.testing.assert_close(ours.read(key), tensor, rtol=0, atol=1e-6, msg=key)
    whole = ExportSafetensors(dtype="fp32", folder=str(tmp_path / "whole"))
    folder = whole.run(context(tmp_path), weights, source).folder
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=2e-5)


def test_the_files_are_as_peft_would_write_them(tmp_path: Path) -> None:
    fields = FIELDS["alone"]
    fresh = adapted(tmp_path, MOE["qwen3_moe"], **fields)
    more = {
        "target_modules": [],
        "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
    }
    folder, model = saved_by_peft(tmp_path / "base", fresh, more)
    source = Lora(**fields, start_from=str(folder)).run(context(tmp_path), fresh.base)
    found = logits(module_with(source, MemoryWeights({})))
    torch.testing.assert_close(found, logits(model), rtol=0, atol=1e-5)
    reader = source.weights()
    weights = MemoryWeights({name: reader.read(name) for name in source.trained})
    done = ExportAdapter().run(context(tmp_path), weights, source)
    ours = load_file(done.folder / "adapter_model.safetensors")
    theirs = load_file(folder / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    config = json.loads((done.folder / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == more["target_parameters"]
    assert config["target_modules"] == []


def test_linear_layers_that_peft_takes_for_experts_stay_linear_layers(tmp_path: Path) -> None:
    """peft reads `gate_proj` of a dense block as the stacked weights of another block's experts."""
    fields = {"rank": 2, "targets": ("gate_proj", "up_proj", "q_b_proj")}
    source = adapted(tmp_path, MOE["deepseek_v3"], **fields)
    names = {layer.name for layer in source.layers}
    assert "model.layers.0.mlp.gate_proj" in names
    assert "model.layers.1.mlp.shared_experts.up_proj" in names
    assert not any(layer.experts for layer in source.layers)
    weights = trained(source)
    done = ExportAdapter().run(context(tmp_path), weights, source)
    config = json.loads((done.folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_b_proj"]
    assert config["target_parameters"] == ["gate_proj.weight", "up_proj.weight"]
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder).eval()
    expected = logits(module_with(source, weights))
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    dora = adapted(tmp_path, MOE["deepseek_v3"], rank=2, dora=True)  # which can only be merged
    with pytest.raises(StageError, match="has neither DoRA nor 4 bits"):
        ExportAdapter().run(context(tmp_path), trained(dora), dora)
    assert ExportSafetensors().run(context(tmp_path), trained(dora), dora).total_bytes


@pytest.mark.parametrize("kind", spread(["qwen3_moe", "mixtral", "gpt_oss"], 2))
def test_a_range_of_merged_experts_is_that_of_the_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.adapter.source.CHUNK", 7 * 4 * 24)
    source = adapted(tmp_path, MOE[kind], rank=3)
    merged = source.merge_trained(trained(source))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = merged.read(name).view(-1)
    one = whole.numel() // merged.spec(name).shape[0]
    ranges = [(0, 1), (one - 1, one + 1), (5, 3 * one - 7), (one, 2 * one), (0, len(whole))]
    for start, stop in ranges:
        assert torch.equal(torch.cat(list(merged.chunks(name, start, stop))), whole[start:stop])


def gradients(model: Any, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of the trained parameters."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    ids = torch.tensor([[1, 5, 9, 2, 30, 7, 7]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", spread(list(MOE), 2))
@pytest.mark.parametrize("rank", [3, 8])
def test_gradients_are_those_of_changed_weights(kind: str, rank: int, tmp_path: Path) -> None:
    """By groups, by single products, and through the weights W + s B A."""
    source = adapted(tmp_path, MOE[kind], rank=rank, targets=(), target_parameters=("down_proj",))
    module = module_with(source, trained(source))
    loss, grads = gradients(module, "grouped_mm")
    plain_loss, plain = gradients(module, "eager")
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    assert {".".join(name.split(".")[-3:]) for name in grads} == {
        "experts.lora_A.down_proj", "experts.lora_B.down_proj",
    }  # fmt: skip
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    merged = source.merge_trained(trained(source))
    changed.load_state_dict({name: merged.read(name) for name in merged.names()}, strict=False)
    assert gradients(changed, "eager")[0] == pytest.approx(float(loss), rel=1e-6)
    for layer in source.layers:
        torch.testing.assert_close(grads[layer.down], plain[layer.down], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(grads[layer.up], plain[layer.up], rtol=1e-5, atol=1e-7)
        whole = dict(changed.named_parameters())[layer.weight].grad
        whole = whole.mT if layer.transposed else whole
        down = dict(module.named_parameters())[layer.down].detach()
        expected = layer.scaling * whole @ down.mT
        torch.testing.assert_close(grads[layer.up], expected, rtol=1e-4, atol=1e-7)
        up = dict(module.named_parameters())[layer.up].detach()
        expected = layer.scaling * up.mT @ whole
        torch.testing.assert_close(grads[layer.down], expected, rtol=1e-4, atol=1e-7)


LEFT = {
    "experts": (
        "qwen3_moe",
        {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
        ["11,520 parameters of model.layers.*.mlp.experts.gate_up_proj, "
         "model.layers.*.mlp.experts.down_proj get no update and stay as they are; "
         "target_parameters: [mlp.experts.down_proj, mlp.experts.gate_up_proj] includes them"],
    ),
    "linear layers": (
        "llama",
        {"targets": ("q_proj", "k_proj", "v_proj", "mlp.up_proj", "mlp.down_proj")},
        ["4,392 parameters of model.layers.*.self_attn.o_proj.weight, "
         "model.layers.*.mlp.gate_proj.weight get no update and stay as they are; targets: "
         "all-linear includes them, or their names mlp.gate_proj, self_attn.o_proj"],
    ),
    "dora": (
        "mixtral",
        {"dora": True},
        ["17,280 parameters of model.layers.*.mlp.experts.gate_up_proj, "
         "model.layers.*.mlp.experts.down_proj get no update and stay as they are; DoRA has none "
         "for experts; train_also: ['*.mlp.experts.down_proj', '*.mlp.experts.gate_up_proj'] "
         "trains them as a whole"],
    ),
    "nothing": ("qwen3_moe", {}, []),
    "nothing, in 4 bits": ("llama", {"quantize": "nf4"}, []),
    "trained as a whole": ("mixtral", {"train_also": ("*.experts.*",)}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_warning_names_what_has_no_update(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, fields, said = LEFT[name]
    with caplog.at_level(logging.INFO):
        adapted(tmp_path, MOE.get(kind, TINY), rank=2, **fields)
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert warned == said
    mentioned = [one.getMessage() for one in caplog.records if "train_also trains" in one.message]
    assert bool(mentioned) == (kind in MOE)


QWEN, MIXTRAL = MOE["qwen3_moe"], MOE["mixtral"]


@pytest.mark.parametrize(
    ("config", "settings", "key"),
    [
        (MIXTRAL, {}, None),
        (QWEN, {}, None),
        (QWEN, {"target_parameters": ()}, "target_parameters"),
        (MIXTRAL, {"targets": ("q_proj",)}, "target_parameters"),
        (MIXTRAL, {"targets": ("q_proj",), "target_parameters": ("experts.down_proj",)}, None),
        (MIXTRAL, {"dora": True}, "dora"),
        (MIXTRAL, {"dora": True, "train_also": ("*.experts.*",)}, None),
        (MIXTRAL, {"dora": True, "train_also": ("*norm.weight",)}, "dora"),
        (TINY, {"targets": ("q_proj",)}, None),
    ],
)
def test_check_warns_of_experts_without_updates(
    config: dict[str, Any], settings: dict[str, Any], key: str | None
) -> None:
    stage = Lora(**settings)
    problems = list(stage.check(plan_view({"model": HfModel(config=config), "adapter": stage})))
    assert [(one.key, one.warning) for one in problems] == ([(key, True)] if key else [])
    assert all(one.message.startswith("experts get no update: ") for one in problems)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("qwen3_moe", {"target_parameters": ("experts.w1",)},
         "experts.w1' (they are called mlp.experts.down_proj, mlp.experts.gate_up_proj)"),
        ("llama", {"target_parameters": ("down_proj",)}, "(leave out target_parameters)"),
        ("mixtral", {"targets": (), "target_parameters": ("down_proj",),
                     "train_also": ("*.down_proj",)},
         "experts.down_proj is trained through its update"),
    ],
)  # fmt: skip
def test_mistakes(kind: str, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        adapted(tmp_path, MOE.get(kind, TINY), **fields)
    assert words in f"{caught.value}"


def test_settings_that_exclude_each_other() -> None:
    for stage, key in (
        (Lora(dora=True, target_parameters=("experts.down_proj",)), "target_parameters"),
        (Lora(targets=()), "targets"),
    ):
        assert [one.key for one in stage.check(plan_view({})) if not one.warning] == [key]
