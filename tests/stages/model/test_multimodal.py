"""Models of more than text are trained on text: all else is left out, and passed through."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.adapter.lora import Lora
from stages.model.checks import multimodal_notes, problems
from stages.model.compat import auto_class, image_text_types, is_multimodal
from stages.model.config_checks import NOT_BY_TEXT
from stages.model.declared import outline
from stages.model.files import read_json
from stages.model.hf import HfModel
from stages.model.source import HfSource, open_source
from stages.wrap.axes import PipelineParallel
from stages.wrap.axis_checks import axis_problems
from stages.wrap.fsdp import Fsdp
from tests.support.every_family import small
from tests.support.model_folders import edit, tensors_of
from tests.support.models import FAMILIES, context, filled, random_source, save_tokenizer
from tests.support.multimodal import CONFIGS, saved, whole_source
from tests.support.tier import spread

IDS = torch.tensor([[3, 17, 55, 4, 90, 8, 21]])


def opened(folder: Path, **fields: Any) -> HfSource:
    return open_source(HfModel(path=str(folder), **fields), context(folder))


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_has_the_logits_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path)
    source = opened(tmp_path)
    model = filled(source)
    assert type(model) is type(whole)
    with torch.no_grad():
        expected, found = whole(input_ids=IDS).logits, model(input_ids=IDS).logits
    assert torch.allclose(found, expected, atol=1e-6)
    left_out = set(dict(whole.named_parameters())) - set(dict(model.named_parameters()))
    assert left_out
    assert all("language_model" not in name or "cross_attn" in name or kind == "mllama"
               for name in left_out)  # fmt: skip
    model.train()
    model(input_ids=IDS).logits.logsumexp(-1).sum().backward()
    assert [name for name, one in model.named_parameters() if one.grad is None] == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_all_else_is_passed_through_under_its_names(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path, torch.bfloat16)
    source = opened(tmp_path)
    passed = source.passed_through()
    assert passed is not None
    stored, own = tensors_of(tmp_path), set(source.weights().names())
    assert len(passed.names()) + len(own) >= len(stored)
    for name in passed.names():
        assert passed.spec(name).dtype == stored[name].dtype
        assert torch.equal(passed.read(name), stored[name])


def test_what_is_not_read_is_said_once_with_number_and_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved("llava", tmp_path)
    source = opened(tmp_path)
    source.weights()
    source.inference_view.weights()
    (said,) = caplog.messages
    passed = source.passed_through()
    assert passed is not None
    count = len(passed.names())
    assert f"passed through to the export: {count} tensors, " in said
    assert "model.vision_tower." in said
    with pytest.raises(StageError, match=r"lm_head\.weight is used, and so cannot be passed"):
        opened(tmp_path, unused_weights={"lm_head.*": "pass_through"}).weights()


def test_a_tensor_of_another_part_needs_a_word(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path)
    extra = {"mtp.fc.weight": torch.ones(4, 5).half(), "mtp.norm.weight": torch.ones(3)}
    edit(tmp_path, lambda t: t.update(extra))
    with pytest.raises(StageError, match=r"unexpected 2 tensors, 52 B \(mtp.fc.weight, mtp.norm"):
        opened(tmp_path).weights()
    fates: dict[str, Any] = {"mtp.fc.*": "pass_through", "mtp.*": "drop"}
    source = opened(tmp_path, unused_weights=fates)
    source.weights()
    passed = source.passed_through()
    assert passed is not None
    names = set(passed.names())
    assert "mtp.fc.weight" in names
    assert "mtp.norm.weight" not in names
    assert passed.spec("mtp.fc.weight").dtype == torch.float16


def test_towers_cannot_be_dropped_or_missing(tmp_path: Path) -> None:
    saved("gemma3", tmp_path)
    with pytest.raises(StageError, match="cannot be dropped, as the exported model would lack it"):
        opened(tmp_path, unused_weights={"model.vision_tower.*": "drop"}).weights()
    name = next(name for name in tensors_of(tmp_path) if name.startswith("vision_tower"))
    edit(tmp_path, lambda t: t.pop(name))
    with pytest.raises(StageError, match=r"missing 1 tensor \(model.vision_tower"):
        opened(tmp_path).weights()


TEXT, WHOLE = "AutoModelForCausalLM", "AutoModelForImageTextToText"


@pytest.mark.parametrize(
    ("kind", "stated", "name"),
    [
        ("llama", None, TEXT),
        ("gemma3", None, WHOLE),
        ("qwen3_5", None, TEXT),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", WHOLE),
        ("qwen3_5", "Qwen3_5ForCausalLM", TEXT),
        ("llava", "other", WHOLE),
    ],
)
def test_the_class_of_the_source_is_trained(kind: str, stated: str | None, name: str) -> None:
    assert (
        auto_class({"model_type": kind, **({"architectures": [stated]} if stated else {})}) == name
    )


def said(stage: HfModel) -> list[str]:
    return [problem.message for problem in problems(stage)]


def test_check_refuses_what_text_does_not_train_and_random_weights(tmp_path: Path) -> None:
    for kind in ("blip-2", "t5gemma2", "git"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        (found,) = said(HfModel(path=str(tmp_path)))
        assert found == f"a {kind} is a model of more than text, and {NOT_BY_TEXT[kind]}"
    (found,) = said(HfModel(config={"model_type": "llava"}))
    assert "an export needs weights of the rest" in found


def test_check_says_what_is_trained_and_refuses_stages(tmp_path: Path) -> None:
    saved("gemma3", tmp_path)
    stage = HfModel(path=str(tmp_path))
    assert said(stage) == []
    (note,) = multimodal_notes(stage)
    assert note.warning
    assert "its language model is trained, all else stays in its files" in note.message
    wrap = Fsdp(pipeline_parallel=PipelineParallel(size=2))
    plan = plan_view({"model": stage, "wrap": wrap}, procs=2)
    (found,) = axis_problems(wrap, plan)
    assert "is not divided into stages" in found.message


SHRUNK: dict[str, dict[str, Any]] = {
    kind: {"text_config": {"head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}}
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl", "glmga")
}  # fmt: skip
UNBUILT = {
    "aya_vision", "chameleon", "cohere_compass", "cosmos3_edge", "deepseek_ocr2", "dots3_note",
    "emu3", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "gemma3n", "glm46v", "glm4v", "glm4v_moe",
    "glm5_next", "glm_ocr", "glmga", "granite4_vision", "granite_docling", "hunyuan_vl",
    "inkling2", "inkling_mm_model", "kosmos-2", "mistral4", "muse_spark", "paddleocr_vl",
    "perception_lm", "qwen2_5_omni_thinker", "qwen4_exp", "step3p7", "unlimited_ocr",
}  # fmt: skip
"""Types whose shrunk config cannot be built or computed with."""
SPARSE_INDEX = {"mistral_large4"}
"""Types whose attention chooses tokens by weights that its output gives no gradient."""
WALKED = sorted(set(image_text_types()) - set(NOT_BY_TEXT) - UNBUILT)


def shrunk(kind: str) -> dict[str, Any]:
    config = small(kind)
    for key, value in SHRUNK.get(kind, {}).items():
        config[key] = {**config.get(key, {}), **value}
    whole = image_text_types()[kind]
    return {**config, "architectures": [whole if isinstance(whole, str) else whole[0]]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", spread(WALKED, 3))
def test_every_type_trains_on_text_alone(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shrunk(kind)))
    assert is_multimodal(read_json(tmp_path / "config.json"))
    source = opened(tmp_path, init="random", attention="eager")
    model = with_numbers(source)
    ids = torch.arange(9)[None] + 5
    model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    idle = [name for name, one in model.named_parameters() if one.grad is None]
    assert idle == [] or (kind in SPARSE_INDEX and all("indexer" in name for name in idle))


def with_numbers(source: HfSource) -> Any:
    """Return the module with some numbers for weights."""
    model = outline(source).train()
    made: dict[Any, Any] = {}
    torch.manual_seed(0)
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                values = torch.randn(one.shape) * 0.05 + (one.ndim == 1)
                module._parameters[name] = made.setdefault(one, torch.nn.Parameter(values))
    return model


TOWERS = {
    "gemma3": "vision_tower.encoder.layers",
    "qwen2_5_vl": "visual.blocks",
    "llava": "vision_tower.encoder.layers",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_of_text_and_of_towers_are_apart(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    source = whole_source(context(tmp_path), path=str(tmp_path))
    model = source.build()
    names = {module: name for name, module in model.named_modules()}
    text = [names[block] for block in source.blocks(model)]
    layers = 3 if kind == "mllama" else 2
    assert text == [f"model.language_model.layers.{number}" for number in range(layers)]
    towers = [names[block] for block in source.tower_blocks(model)]
    assert towers
    assert not any("language_model" in name for name in towers)
    if kind in TOWERS:
        assert towers == [f"model.{TOWERS[kind]}.0"]
    alone = opened(tmp_path)
    assert not alone.tower_blocks(module := alone.build())
    assert len(alone.blocks(module)) == 2  # without the layer that needs images


def test_a_processor_has_the_tokenizer_of_the_recipe(tmp_path: Path) -> None:
    from transformers import LlavaProcessor

    saved("llava", tmp_path)
    save_tokenizer(tmp_path)
    prepared = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    source = opened(tmp_path, chat_template="chatml")
    processor = source.processor()
    assert type(processor) is LlavaProcessor
    assert processor.tokenizer is source.tokenizer()
    assert processor.chat_template == source.tokenizer().chat_template
    assert "im_start" in processor.chat_template
    assert processor.image_processor.size["shortest_edge"] == 8
    assert Lora().declared(source, seed=0).processor() is processor
    assert source.inference_view.processor() is processor


def test_a_model_of_text_has_no_processor(tmp_path: Path) -> None:
    assert random_source(FAMILIES["llama"], tmp_path).processor() is None
    filled(random_source(FAMILIES["llama"], tmp_path)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert opened(tmp_path).processor() is None


@pytest.mark.parametrize(
    ("kind", "file", "told"),
    [
        pytest.param(
            "qwen2_5_vl",
            "Qwen2VLImageProcessor",
            r"\w+ requires the Torchvision library but it",
            marks=pytest.mark.skipif(find_spec("torchvision") is not None, reason="is installed"),
        ),
        ("gemma3", "mine", "Unrecognized image processor in "),
    ],
)
def test_what_a_processor_lacks_is_said(kind: str, file: str, told: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": file}))
    with pytest.raises(
        StageError, match=rf"the processor in \S+ cannot be loaded: {told}"
    ) as found:
        opened(tmp_path).processor()
    assert "\n" not in str(found.value)
