"""Mistakes in an `adapter.lora` slot, most of which `pipe check` finds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError
from pipeline.testing import assert_conforms, plan_view
from pipeline.testing.conformance import checked
from stages.adapter.lora import Lora
from stages.export.safetensors import ExportAdapter
from stages.model.block_changes import is_linear
from stages.model.declared import outline
from stages.model.hf import HfModel
from stages.model.source import open_source
from tests.stages.data.fakes import FakeSource
from tests.support.adapters import adapted, trained
from tests.support.every_family import every, small
from tests.support.models import FAMILIES, context
from tests.support.moe import MOE
from tests.support.runs import TINY
from tests.support.tier import spread

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such layer": ({"targets": ("q_prj",)}, "linear layers are called"),
    "one of two": ({"targets": ("q_proj", "kproj")}, "no linear layer's name ends in 'kproj'"),
    "no linear layer": ({"targets": ("embed_tokens",)}, "of class Embedding, which is no"),
    "no such parameter": ({"train_also": ("head",)}, "'head' matches no parameter"),
    "an update's own weight": (
        {"train_also": ("*.q_proj.weight",)},
        "q_proj.weight is trained through its update",
    ),
    "tied": ({"targets": ("lm_head",)}, "lm_head shares its weight with another module"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_that_a_run_finds(name: str, tmp_path: Path) -> None:
    fields, words = MISTAKES[name]
    with pytest.raises(StageError) as caught:
        adapted(tmp_path, TINY, **fields)
    assert words in f"{caught.value}"


def test_conforms() -> None:
    assert_conforms(
        Lora,
        valid={"rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj"], "dora": True},
        invalid=[("rank", {"rank": 0}), ("targets", {"targets": []}),
                 ("start_from", {"start_from": "/nowhere"})],
    )  # fmt: skip
    assert_conforms(ExportAdapter, valid={"dtype": "bf16"}, invalid=[("prompt", {"prompt": " "})])


@pytest.mark.parametrize("field", [{"vocab_size": 128}, {"new_weights": ("lm_head.*",)}])
def test_an_adapter_belongs_to_a_model_that_others_have(field: dict[str, Any]) -> None:
    plan = plan_view({"model": HfModel(path="./model", **field), "adapter": Lora()})
    (problem,) = checked(ExportAdapter(), plan)
    assert f"{next(iter(field))} makes another model" in problem.message


# Where it goes on from.

SAVED = {"rank": 4, "alpha": 8.0, "targets": ("q_proj",)}


def test_an_adapter_goes_on_with_its_own_settings(tmp_path: Path) -> None:
    source = adapted(tmp_path, TINY, **SAVED)
    done = ExportAdapter().run(context(tmp_path), trained(source), source)

    def said(**fields: Any) -> list[str]:
        stage = Lora(**{**SAVED, **fields, "start_from": str(done.folder)})
        found = [problem for problem in stage.check(plan_view({})) if problem.key == "start_from"]
        return [f"{problem.message} ({problem.hint})" for problem in found]

    assert said() == []
    assert said(rank=2) == ["was trained with rank: 4, this is 2 (set rank: 4)"]
    assert said(alpha=16.0, scaling="rslora") == [
        "was trained with alpha: 8.0, this is 16.0 (set alpha: 8.0)",
        "was trained with scaling: standard, this is rslora (set scaling: standard)",
    ]
    assert said(dora=True) == ["was trained with dora: False, this is True (set dora: False)"]


# Targets.


def errors(config: dict[str, Any], **fields: Any) -> list[str]:
    """Return the errors of the adapter's slot."""
    adapter = Lora(**fields)
    plan = plan_view({"model": HfModel(config=config), "adapter": adapter})
    return [str(one) for one in adapter.check(plan) if not one.warning]


@pytest.mark.parametrize(
    ("family", "target", "hint"),
    [
        ("llama", "q_prj", "did you mean `q_proj`? linear layers are called down_proj, gate_proj"),
        ("gpt2", "q_proj", "linear layers are called c_attn, c_fc, c_proj"),
        ("phi3", "mlp.gate_proj", "gate_up_proj"),
        ("llama", "selfattn.q_proj", "linear layers are called down_proj"),
        ("qwen2", "query_key_value", "linear layers are called down_proj"),
    ],
)
def test_a_target_that_matches_nothing(family: str, target: str, hint: str, tmp_path: Path) -> None:
    (said,) = errors(FAMILIES[family], targets=(target,))
    kind = FAMILIES[family]["model_type"]
    assert said.startswith(
        f"targets: no linear layer of a {kind} has a name that ends in '{target}'"
    )
    assert hint in said
    ctx = context(tmp_path)
    with pytest.raises(StageError, match=r"adapter\.lora"):
        Lora(targets=(target,)).run(ctx, HfModel(config=FAMILIES[family]).run(ctx))


def test_experts_that_match_nothing() -> None:
    (said,) = errors(MOE["mixtral"], target_parameters=("experts.up_gate_proj",))
    assert said.startswith("target_parameters: no weight of a mixtral has a name that ends in")
    assert errors(MOE["mixtral"], target_parameters=("experts.gate_up_proj",)) == []


def test_a_name_of_another_module_is_found_when_the_model_is_built(tmp_path: Path) -> None:
    assert errors(FAMILIES["llama"], targets=("input_layernorm",)) == []
    ctx = context(tmp_path)
    with pytest.raises(StageError, match="linear layers are called down_proj"):
        Lora(targets=("input_layernorm",)).run(ctx, HfModel(config=FAMILIES["llama"]).run(ctx))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", spread(every(), 12))
def test_no_name_of_a_layer_is_refused(kind: str, tmp_path: Path) -> None:
    try:
        config = small(kind)
        model = outline(open_source(HfModel(config=config, attention="eager"), context(tmp_path)))
    except StageError as error:
        pytest.skip(f"its shrunk config cannot be built: {error}")
    names = [name for name, module in model.named_modules() if is_linear(module)]
    weights = [name for name, one in model.named_parameters() if one.ndim == 3]
    assert errors(config, targets=tuple(names), target_parameters=tuple(weights)) == []


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from stages.adapter.lora import Lora; from stages.model.hf import HfModel;"
        "from pipeline.testing import plan_view;"
        "lora = Lora(targets=('x_proj',));"
        "slots = {'model': HfModel(config={'model_type': 'llama'}), 'adapter': lora};"
        "assert len([*lora.check(plan_view(slots))]) == 1;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Random weights that would stay frozen while data train on them.

BOTH = ("*embed_tokens.weight", "lm_head.weight")


def frozen(model: HfModel, *also: str) -> list[str]:
    """Return the mistakes of an adapter's `train_also`."""
    stage = Lora(train_also=also)
    view = plan_view({"model": model, "adapter": stage})
    return [p.message for p in stage.check(view) if p.key == "train_also"]


def model(
    folder: Path, rows: int, *, kind: str = "llama", tied: bool | None = False, **fields: Any
) -> HfModel:
    """Return a slot of a model with `rows` rows, whose tokenizer has ids up to 258."""
    config = {"model_type": kind, "vocab_size": rows, "tie_word_embeddings": tied}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    FakeSource().fast.save_pretrained(folder)
    return HfModel(path=str(folder), **fields)


def test_new_rows_that_the_tokenizer_uses(tmp_path: Path) -> None:
    grown = model(tmp_path, 257, vocab_size=320)
    [message] = frozen(grown)
    assert message == (
        "2 rows of the vocabulary are new and random, and stay frozen while the tokenizer uses "
        "them: train_also names no embedding and no head"
    )
    assert frozen(grown, *BOTH) == frozen(grown, "*") == []
    assert "names no head" in frozen(grown, BOTH[0])[0]
    assert "names no embedding" in frozen(grown, BOTH[1])[0]
    tied = dataclasses.replace(model(tmp_path, 257, tied=True), vocab_size=320)
    assert "names no embedding" in frozen(tied)[0]
    assert frozen(tied, BOTH[0]) == []


@pytest.mark.parametrize(("rows", "size"), [(259, 320), (300, 320), (300, 260), (300, None)])
def test_rows_that_no_token_uses_may_be_random(tmp_path: Path, rows: int, size: int | None) -> None:
    assert frozen(model(tmp_path, rows, vocab_size=size)) == []
    assert frozen(HfModel(config={"model_type": "llama", "text_config": [1]})) == []


@pytest.mark.parametrize(
    ("kind", "tied", "also", "lacking"),
    [
        ("gpt_neox", None, ("embed_out.weight",), ["embedding", "head"]),  # of older releases
        ("gpt_neox", None, ("gpt_neox.embed_in.weight",), ["head"]),
        ("gpt_neox", None, ("*.embed_in.*", "lm_head.*"), []),
        ("gpt2", None, ("transformer.wte.weight",), []),
        ("gpt2", None, ("lm_head.weight",), ["embedding"]),
        ("gpt2", False, ("*wte*",), ["head"]),
        ("gemma", None, ("model.embed_tokens.weight",), []),
        ("gemma", None, ("embed_tokens",), ["embedding"]),  # which matches no whole name
        ("opt", None, ("model.decoder.embed_tokens.weight",), []),
        ("rwkv", False, ("rwkv.embeddings.*", "head.weight"), []),
        ("llama", False, ("model.layers.0.*", "*overhead*"), ["embedding", "head"]),
        ("xlstm", None, (), ["embedding", "head"]),  # whose source does not name them
        ("xlstm", None, ("backbone.embeddings.weight",), []),
    ],
)
def test_the_names_of_tables_are_those_of_the_type(
    tmp_path: Path, kind: str, tied: bool | None, also: tuple[str, ...], lacking: list[str]
) -> None:
    grown = model(tmp_path, 257, kind=kind, tied=tied, vocab_size=320)
    told = [f"names no {' and no '.join(lacking)}"] if lacking else []
    assert [each.rpartition("train_also ")[2] for each in frozen(grown, *also)] == told


def test_a_new_head(tmp_path: Path) -> None:
    new = model(tmp_path, 259, new_weights=("lm_head.*",))
    assert frozen(new) == [
        "lm_head.*, which the model slot's new_weights draw at random, stay frozen"
    ]
    assert frozen(new, "lm_head.*") == frozen(new, "lm_*") == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "tokenizer.json cannot be read: "),
        (lambda text: text.replace('"id": 258', '"it": 258'), "tokenizer.json is damaged: a token"),
        (lambda text: text.replace('"id": 258', '"id": null'), "tokenizer.json is damaged: a tok"),
        (lambda text: text.replace('"id": 258', '"id": "x"'), "tokenizer.json is damaged: a tok"),
        (lambda text: "[]", "tokenizer.json is not a JSON object"),
        (lambda text: '{"model": [1]}', "tokenizer.json is damaged: a token"),
    ],
)
def test_a_damaged_tokenizer_is_a_sentence(
    tmp_path: Path, damage: Callable[[str], str], told: str
) -> None:
    grown = model(tmp_path, 257, vocab_size=320)
    file = tmp_path / "tokenizer.json"
    before = file.read_text("utf-8")
    file.write_text(damage(before), "utf-8")
    assert file.read_text("utf-8") != before
    (message,) = [p.message for p in checked(Lora(), plan_view({"model": grown})) if not p.warning]
    assert message.startswith(f"{tmp_path}/{told}")
