from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pipeline.testing import plan_view
from stages.model.chat_template import known_templates, read_template, unknown_tokens
from stages.model.hf import HfModel
from tests.stages.data.fakes import FakeSource

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


def test_mistakes_show_in_the_check(tmp_path: Path) -> None:
    model = HfModel(config={"model_type": "llama"})

    def problem(given: str) -> str:
        stage = dataclasses.replace(model, chat_template=given)
        found = [each for each in stage.check(plan_view()) if each.key == "chat_template"]
        return str(found[0]) if found else ""

    good, bad = tmp_path / "good.jinja", tmp_path / "bad.jinja"
    good.write_text("{% for m in messages %}{% generation %}{% endgeneration %}{% endfor %}")
    bad.write_text("{% for m in messages %}\n{{ m. }}")
    assert problem("chatml") == problem(str(good)) == ""
    assert "no chat template is called 'chatm'" in problem("chatm")
    assert "did you mean chatml" in problem("chatm").replace("`", "").replace("'", "")
    assert "known here: chatml, gemma, llama3, plain" in problem("zephyr")
    assert f"{bad}:2: no chat template: " in problem(str(bad))
    assert "is not a file" in problem(str(tmp_path))
    assert "is not a file" in problem(str(tmp_path / "absent.jinja"))


def test_tokens_that_the_tokenizer_lacks() -> None:
    fast = FakeSource().fast
    assert unknown_tokens("<|s|>{{ x }}<|im_end|><|e|>", fast) == ["<|im_end|>"]
    assert unknown_tokens(read_template("plain"), fast) == []
