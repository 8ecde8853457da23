"""Tokenizers, chat templates, what else is next to the weights, and the ids of begin, end and
padding in an exported model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.trainer_utils import align_special_tokens

from pipeline.errors import StageError
from stages import template_limits
from stages.model.assets import (
    align,
    aligned,
    known_templates,
    read_template,
    turn_ends,
    unknown_tokens,
)
from stages.model.hf import HfModel
from tests.stages.data.fakes import MARKED, PLAIN, FakeSource
from tests.support.model_folders import configured, opened, saved
from tests.support.models import context, random_source, save_tokenizer, tiny_llama_config

CHAT = [
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "C"},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
                   "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"),
        ("gemma", "<|s|><start_of_turn>user\nA<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
                  "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n"),
        ("llama3", "<|s|><|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
                   "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
                   "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
                   "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("plain", "<|s|>User: A\nAssistant: b<|end|>\nUser: C\nAssistant: "),
    ],
)  # fmt: skip
def test_the_templates_that_come_with_the_package(name: str, text: str) -> None:
    fast = FakeSource(read_template(name), bos="<|s|>").fast
    assert fast.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == text
    assert name in known_templates()


def test_tokens_that_the_tokenizer_lacks() -> None:
    fast = FakeSource().fast
    assert unknown_tokens("<|s|>{{ x }}<|im_end|><|e|>", fast) == ["<|im_end|>"]
    assert unknown_tokens(read_template("plain"), fast) == []


IDS = st.none() | st.integers(0, 5) | st.lists(st.integers(0, 5), min_size=1, unique=True)


class _Part:
    """A config, or a model with two, as far as transformers' alignment looks at it."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def get_text_config(self) -> _Part:
        return self


@given(config=IDS, generation=IDS, eos=st.integers(0, 5))
def test_ends_are_those_of_transformers(config: Any, generation: Any, eos: int) -> None:
    """Where both have the tokenizer's end, or neither; Trainer also moves the end of one config to
    the front where only the other lacks it."""
    model: Any = _Part(
        config=_Part(eos_token_id=copy.copy(config), bos_token_id=None, pad_token_id=None),
        generation_config=GenerationConfig(eos_token_id=copy.copy(generation)),
    )
    align_special_tokens(model, _Part(eos_token_id=eos, bos_token_id=None, pad_token_id=None))

    def those(value: Any) -> set[int]:
        return set(value) if isinstance(value, list) else {value}

    ours = aligned(config, [eos], several=isinstance(config, list))
    assert those(ours) == those(model.config.eos_token_id)
    found = aligned(generation, [eos], several=True)
    assert those(found) == those(model.generation_config.eos_token_id)


PARTS = PLAIN.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
CLOSES = "{% if not add_generation_prompt %}<|end|>{% endif %}"
"""What Phi-3's and Phi-4-mini's put after the last message."""
RETURNS = PLAIN.replace("<|e|>", "{{ '<|end|>' if loop.last else '<|e|>' }}")
"""Ends the last message otherwise than those before it, as gpt-oss's."""
CLOSED_TWICE = PLAIN.replace("<|e|>", "{{ '<|end|>' if m.role == 'assistant' }}<|e|>")
"""Closes an answer within its turn, as Cohere 2's."""
ROLES = {"user": "<|s|>", "assistant": "<|end|>", "tool": "<|e|>"}
ENDLESS = f"{{% set roles = {ROLES} %}}"
ENDLESS += "{% for m in messages %}{{ roles[m.role] }}\n{{ m.content }}{% endfor %}"
"""Ends a turn with the token that begins the next, as GLM's."""


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (PLAIN, [258]),
        (MARKED, [258]),
        (PARTS, [258]),
        (PLAIN + CLOSES, [258]),
        (PLAIN.replace("<|e|>\n", "<|e|>") + CLOSES, [258]),
        (RETURNS, [256]),
        (CLOSED_TWICE, [258]),
        (ENDLESS, [257, 258]),
        (None, []),
        ("{{ messages[0].content }}", []),
        ("{{ raise_exception('no') }}", []),
        ("answer", []),
    ],
)
def test_the_special_tokens_that_end_a_turn(template: str | None, ends: list[int]) -> None:
    assert turn_ends(FakeSource(template).fast) == ends


def test_a_begin_token_ends_no_turn() -> None:
    assert turn_ends(FakeSource(ENDLESS, bos="<|s|>").fast) == [258]


def test_a_template_without_end_has_no_end_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 1)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert turn_ends(FakeSource(loops + PLAIN).fast) == []
    assert turn_ends(FakeSource(PLAIN).fast) == [258]


def exported(folder: Path, source: FakeSource, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return both configs of an export of a random model with a tokenizer."""
    source.fast.save_pretrained(folder / "tokenizer")
    config = tiny_llama_config(**{"vocab_size": 300, "pad_token_id": None, **fields})
    stage = HfModel(config=config, tokenizer=str(folder / "tokenizer"))
    out = folder / "out"
    out.mkdir()
    stage.run(context(folder)).save_assets(out, dtype="fp32")
    return {
        name: json.loads((out / f"{name}.json").read_text())
        for name in ("config", "generation_config")
    }


def test_an_export_stops_at_the_tokenizer_s_end_and_at_the_end_of_a_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = exported(tmp_path, FakeSource())
    assert found["config"]["eos_token_id"] == 256
    assert found["generation_config"]["eos_token_id"] == [256, 258, 2]
    assert "_from_model_config" not in found["generation_config"]
    assert caplog.text.count("eos_token_id 2 became 256; generation_config.json: eos_token_id") == 1


def test_what_agrees_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = exported(tmp_path, FakeSource(None), eos_token_id=[2, 256])
    assert found["config"]["eos_token_id"] == [2, 256]
    assert "begins, ends and pads" not in caplog.text


def test_an_id_that_is_no_row_is_left_out(tmp_path: Path) -> None:
    found = exported(tmp_path, FakeSource(), vocab_size=257)
    assert found["generation_config"]["eos_token_id"] == [256, 2]


def test_ids_of_the_text_part_of_a_config(tmp_path: Path) -> None:
    config = {"model_type": "more", "text_config": {"eos_token_id": [2]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text("{}")
    said = list(align(tmp_path, FakeSource(None).fast, 300))
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["text_config"]["eos_token_id"] == [256, 2]
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 256}
    assert len(said) == 2


def test_tokenizer_and_assets(tmp_path: Path) -> None:
    saved(tmp_path / "in")
    configured(tmp_path / "in", use_cache=True)
    save_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    source = opened(tmp_path / "in")
    assert source.tokenizer()("a b")["input_ids"] == [3, 4]
    source.save_assets(out, dtype="bf16")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (out / "generation_config.json").is_file()
    assert (out / "tokenizer.json").is_file()
    for file in out.iterdir():
        assert str(tmp_path) not in file.read_text()


def test_a_tokenizer_from_elsewhere_or_none(tmp_path: Path) -> None:
    source = random_source(tiny_llama_config(), tmp_path)
    with pytest.raises(StageError, match=r"comes without a tokenizer.*set `tokenizer`"):
        source.tokenizer()
    source.save_assets(tmp_path, dtype="fp32")
    assert not list(tmp_path.glob("tokenizer*"))
    save_tokenizer(tmp_path)
    stage = HfModel(config=tiny_llama_config(), tokenizer=str(tmp_path))
    assert stage.run(context(tmp_path)).tokenizer()("b a")["input_ids"] == [4, 3]
