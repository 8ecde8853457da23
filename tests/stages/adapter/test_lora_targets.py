"""Targets that match nothing are found by `pipe check`, by the source of the model's type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.adapter.lora import Lora
from stages.model.block_changes import is_linear
from stages.model.declared import outline
from stages.model.hf import HfModel
from stages.model.source import open_source
from tests.support.every_family import every, small
from tests.support.models import FAMILIES, context
from tests.support.moe import MOE
from tests.support.tier import spread


def found(config: dict[str, Any], **fields: Any) -> list[str]:
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
    (said,) = found(FAMILIES[family], targets=(target,))
    kind = FAMILIES[family]["model_type"]
    assert said.startswith(
        f"targets: no linear layer of a {kind} has a name that ends in '{target}'"
    )
    assert hint in said
    ctx = context(tmp_path)
    with pytest.raises(StageError, match=r"adapter\.lora"):
        Lora(targets=(target,)).run(ctx, HfModel(config=FAMILIES[family]).run(ctx))


def test_experts_that_match_nothing() -> None:
    (said,) = found(MOE["mixtral"], target_parameters=("experts.up_gate_proj",))
    assert said.startswith("target_parameters: no weight of a mixtral has a name that ends in")
    assert found(MOE["mixtral"], target_parameters=("experts.gate_up_proj",)) == []


def test_a_name_of_another_module_is_found_when_the_model_is_built(tmp_path: Path) -> None:
    assert found(FAMILIES["llama"], targets=("input_layernorm",)) == []
    ctx = context(tmp_path)
    with pytest.raises(StageError) as caught:
        Lora(targets=("input_layernorm",)).run(ctx, HfModel(config=FAMILIES["llama"]).run(ctx))
    assert "linear layers are called down_proj" in str(caught.value)


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
    assert found(config, targets=tuple(names), target_parameters=tuple(weights)) == []


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
