"""Shapes by arithmetic are those of the modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.site import Site
from pipeline.tracing.watch import Depth
from stages.model.shapes.families import DEFAULTS, shape_of

from pipeline.dist import Dist
from pipeline.errors import StageError
from pipeline.stage import PlanView
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.model.known import known_config
from stages.model.outline import outline
from tests.support.forecasts import LLAMA, declared
from tests.support.gguf import write_llama
from tests.support.runs import context

SITE = Site(ranks=1, local_ranks=1, device="cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head size": {"head_dim": 48},
    "all heads": {"num_key_value_heads": None},
    "head size of qwen2": {"model_type": "qwen2", "head_dim": 32},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
}


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.shape for weight in shape.weights()}


def module_sizes(stage: HfModel, folder: Path, lora: Lora | None = None) -> dict[str, Any]:
    ctx = context(Dist(device=torch.device("cpu")), folder)
    source = stage.run(ctx)
    module = outline(source if lora is None else lora.run(ctx, source))
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_are_the_modules(variant: str, tmp_path: Path) -> None:
    stage = HfModel(config={**LLAMA, **VARIANTS[variant]})
    found = sizes(stage.forecast(SITE))
    assert found == module_sizes(stage, tmp_path)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind)
    for key, value in DEFAULTS[kind].items():
        known = getattr(theirs, key, None)
        if key in ("num_key_value_heads", "head_dim") and value is None:
            # Their classes fill these in from others, as the arithmetic does.
            heads = theirs.num_attention_heads
            assert known in (None, heads, theirs.hidden_size // heads)
        else:
            assert known == value, key


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), ("mlp.up_proj",)], ids=str)
def test_adapters_add_what_peft_adds(targets: Any, tmp_path: Path) -> None:
    stage = HfModel(config=LLAMA)
    lora = Lora(rank=4, targets=targets, train_also=("*norm.weight",))
    shape = lora.forecast(SITE, stage.forecast(SITE))
    module = module_sizes(stage, tmp_path, lora)
    assert sum(weight.elements for weight in shape.weights()) == sum(
        torch.Size(size).numel() for size in module.values()
    )
    trained = {weight.shape for weight in shape.weights() if weight.trained}
    updates = {size for name, size in module.items() if "lora_" in name or "norm" in name}
    assert trained == updates
    assert all(weight.borrowed != weight.trained for weight in shape.weights())


def test_what_is_in_4_bits_takes_4_5_of_them() -> None:
    shape = Lora(quantize="nf4").forecast(SITE, declared(LLAMA))
    packed = [weight for weight in shape.weights() if weight.packed is not None]
    assert len(packed) == 7 * LLAMA["num_hidden_layers"]
    for weight in packed:
        assert weight.bytes(2) == weight.elements * 4.5 / 8


KNOWN = {
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}
"""Hub id -> parameters, as its model card says."""


@pytest.mark.parametrize("repo", KNOWN)
def test_well_known_models_have_the_known_number_of_parameters(repo: str) -> None:
    config = known_config(repo)
    assert config is not None
    assert shape_of(config, None, ()).parameters == KNOWN[repo]
    # A hub id needs no network for it.
    assert HfModel(path=repo).forecast(SITE).parameters == KNOWN[repo]


def test_an_unknown_architecture_says_what_to_do() -> None:
    with pytest.raises(StageError, match=r"sizes of a mixtral are not known.*--trace"):
        declared({"model_type": "mixtral"})


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"hidden_size": "512"}, "hidden_size is '512', expected a whole number from 1 to"),
    "list": ({"hidden_size": [512]}, r"hidden_size is \[512\], expected a whole number"),
    "below nothing": ({"intermediate_size": -1}, "intermediate_size is -1, expected"),
    "nothing": ({"vocab_size": 0}, "vocab_size is 0, expected a whole number from 1"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0, expected"),
    "no size of heads": ({"head_dim": 0}, "head_dim is 0, expected"),
    "fraction": ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0, expected"),
    "no number": ({"vocab_size": float("nan")}, "vocab_size is nan, expected"),
    "true": ({"num_hidden_layers": True}, "num_hidden_layers is True, expected"),
    "null": ({"hidden_size": None}, "hidden_size is null, expected"),
    "too deep": ({"num_hidden_layers": 10**12}, "is 1000000000000, expected .* 1 to 1024"),
    "too wide": ({"hidden_size": 2**31}, "hidden_size is 2147483648, expected"),
    "shared unevenly": (
        {"num_key_value_heads": 3},
        "num_attention_heads is 8, expected a multiple of num_key_value_heads, which is 3",
    ),
    "divided unevenly": (
        {"num_attention_heads": 6},
        "hidden_size is 512, expected a multiple of num_attention_heads, which is 6",
    ),
    "window": ({"sliding_window": "4096"}, "sliding_window is '4096'"),
    "tied by text": ({"tie_word_embeddings": "false"}, "is 'false', expected true or false"),
    "biased by text": ({"attention_bias": "true"}, "attention_bias is 'true', expected"),
    "biased by number": ({"mlp_bias": 1}, "mlp_bias is 1, expected true or false"),
}


def broken() -> list[tuple[str, str]]:
    """Every case with each family that has such fields."""
    pairs = ((kind, case) for kind in DEFAULTS for case in BROKEN)
    return [(kind, case) for kind, case in pairs if {*BROKEN[case][0]} <= {*DEFAULTS[kind]}]


@pytest.mark.parametrize(("kind", "case"), broken())
def test_a_config_that_no_model_can_have_is_refused(kind: str, case: str) -> None:
    change, message = BROKEN[case]
    with pytest.raises(StageError, match=f"config of a {kind}: .*{message}"):
        declared({**LLAMA, "head_dim": None, **change, "model_type": kind})


def test_a_trace_refuses_it_too(tmp_path: Path) -> None:
    ctx = context(Dist(device=torch.device("cpu")), tmp_path)
    for change in ({"num_attention_heads": 0}, {"num_hidden_layers": 10**8}):
        with pytest.raises(StageError, match="expected a whole number"):
            HfModel(config={**LLAMA, **change}).trace(ctx, Depth())


def test_a_config_without_end_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000, "utf-8")
    stage = HfModel(path=str(tmp_path))
    with pytest.raises(StageError, match=r"config\.json cannot be read"):
        stage.forecast(SITE)
    view = PlanView(name="x", seed=0, procs=1, device="cpu", slots={})
    assert [p.message for p in stage.check(view)] == [
        f"{tmp_path}/config.json is not a JSON object"
    ]


def test_fields_of_other_families_count_for_nothing() -> None:
    qwen = {**LLAMA, "model_type": "qwen2"}
    assert sizes(declared({**qwen, "mlp_bias": True})) == sizes(declared(qwen))


def test_a_config_without_a_kind() -> None:
    with pytest.raises(StageError, match=r"no model_type.*such as llama"):
        shape_of({"hidden_size": 64}, None, ())


def test_a_folder_and_its_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    shape = HfModel(path=str(tmp_path), vocab_size=9000).forecast(SITE)
    assert shape.vocabulary == 9000
    assert shape.output.shape == (9000, LLAMA["hidden_size"])


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"config\.json cannot be read"):
        HfModel(path=str(tmp_path)).forecast(SITE)


def test_a_gguf_file_tells_the_same_sizes(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    file = tmp_path / "model.gguf"
    write_llama(file, AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)))
    assert sizes(HfModel(path=str(file)).forecast(SITE)) == sizes(declared(LLAMA))


def test_a_tied_gguf_file() -> None:
    folder = Path(__file__).parents[3] / "recipes" / "models" / "smollm2-135m-instruct"
    shape = HfModel(path=str(next(folder.glob("*.gguf")))).forecast(SITE)
    assert shape.parameters == 134_515_008
    assert shape.output is shape.root[0]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(30), b"text"])
def test_a_broken_gguf_file_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(StageError, match=r"model\.gguf cannot be read"):
        HfModel(path=str(file)).forecast(SITE)
