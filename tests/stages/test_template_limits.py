"""Templates that would take all time or memory are ended with an error that names them."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from click.testing import CliRunner
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.cli import main
from pipeline.errors import StageError
from stages import template_limits
from stages.data.messages import Conversation
from stages.data.rendering import Renderer
from stages.data.rows import Row
from stages.template_limits import Limited, TemplateLimitError
from tests.support.models import random_source, save_tokenizer, tiny_llama_config
from tests.support.tier import spread


def render(messages: list[dict[str, Any]], template: str) -> str:
    return str(render_jinja_template([messages], chat_template=template)[0][0])


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DOUBLED = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = "
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "times": "{{ 'a' * 10 ** 10 }}",
    "doubled": DOUBLED + "ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "added": DOUBLED + "ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "power": "{% set x = 10 ** (10 ** 10) %}{{ x }}",
    "centred": "{{ 'a'|center(9999999999) }}",
    "formatted": "{{ '%9999999999d' % 1 }}",
    "method": "{{ '{:>9999999999}'.format(1) }}",
    "lists": "{{ ([0] * 10 ** 9)|length }}",
    "batches": "{{ [1]|batch(10 ** 10, 0)|list|length }}",
    "filters": "{{ range(99999)|map('center', 99999)|join|length }}",
    "words": "{{ lipsum(n=10 ** 8) }}",
    "output": "{{ 'a' * (3 * 10 ** 8) }}",
    "indented": "{{ ('\n' * 10 ** 7)|indent(10 ** 4, blank=true) }}",
}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limited:
    monkeypatch.setattr(template_limits, "SECONDS", 1)
    return Limited(render, "the model")


def test_the_same_as_by_itself(limited: Limited) -> None:
    assert limited(CHAT, PLAIN) == render(CHAT, PLAIN) == "user: hi\nassistant: ho\n"
    assert limited(CHAT, template="{{ messages|length }}") == "2"


@pytest.mark.parametrize("name", spread([*HOSTILE], 4))
def test_a_hostile_template(name: str, limited: Limited) -> None:
    began = time.process_time()
    with pytest.raises(TemplateLimitError, match="rendering by the template of the model takes ov"):
        limited(CHAT, HOSTILE[name])
    assert time.process_time() - began < 1, "it ran in this process"
    assert limited(CHAT, PLAIN) == render(CHAT, PLAIN)


def test_errors_of_a_template(limited: Limited) -> None:
    for template, said in (
        ("{{ raise_exception('only pairs') }}", "only pairs"), ("{% for %}", "Expected an exp"),
        ("{{ messages[0].content.nothing.at_all }}", "has no attribute 'nothing'"),
    ):  # fmt: skip
        with pytest.raises(jinja2.TemplateError, match=said):
            limited(CHAT, template)
    with pytest.raises(RuntimeError, match="recursion"):
        limited(CHAT, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_a_process_that_is_killed_is_started_again(limited: Limited) -> None:
    limited(CHAT, PLAIN)
    os.kill(limited._child, signal.SIGKILL)
    with pytest.raises(TemplateLimitError):
        limited(CHAT, PLAIN)
    assert limited(CHAT, PLAIN) == render(CHAT, PLAIN)


def test_a_copy_in_a_forked_process_has_its_own(limited: Limited) -> None:
    limited(CHAT, PLAIN)
    child = limited._child
    copy = os.fork()
    if copy == 0:
        good = limited(CHAT, PLAIN) == render(CHAT, PLAIN) and limited._child != child
        limited._end()
        os._exit(0 if good else 1)
    assert os.waitpid(copy, 0)[1] == 0
    assert limited(CHAT, PLAIN) == render(CHAT, PLAIN)
    assert limited._child == child


def test_nothing_is_left(limited: Limited) -> None:
    limited(CHAT, PLAIN)
    child = limited._child
    limited.__del__()
    assert not Path(f"/proc/{child}").exists()


RECIPE = """name: x
launch: {procs: 1, device: cpu}
stages:
  model: {use: model.hf, path: ./model, init: random}
  data: {use: data.chat, files: ./chats.jsonl, sequence_length: 64}
"""


def test_nothing_is_left_by_what_is_garbage_together(limited: Limited) -> None:
    """Objects of a cycle are finalized in any order: here this one after what it holds."""
    limited(CHAT, PLAIN)
    later = Limited(render, "the model")
    later.__dict__, limited.__dict__ = limited.__dict__, later.__dict__
    child = later._child
    cycle: list[Any] = [later]
    cycle.append(cycle)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del later, cycle
        gc.collect()
    assert [str(one.message) for one in warned] == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_show_names_the_template(tmp_path: Path, limited: Limited) -> None:
    """A model that somebody has sent is looked at."""
    random_source(tiny_llama_config(), tmp_path).config.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(HOSTILE["times"])
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}, '
                                          '{"role": "assistant", "content": "b"}]}\n')  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    result = CliRunner().invoke(main, ["show", str(tmp_path / "recipe.yaml"), "--data", "1"])
    assert result.exit_code == 1, result.output
    assert "chats.jsonl:1: rendering by the template of " in result.output
    assert f"{tmp_path}/" in result.output.split("template of ")[1]
    assert "a bug in pipe" not in result.output


def test_a_template_is_not_asked_again_once_it_has_taken_too_much(limited: Limited) -> None:
    def apply(messages: Any, **_: Any) -> str:
        return render(messages, HOSTILE["times"])

    tokenizer = SimpleNamespace(
        apply_chat_template=apply, name_or_path="the model", chat_template=PLAIN,
        get_chat_template=lambda *_: PLAIN,
    )  # fmt: skip
    renderer = Renderer(tokenizer, "2026-01-01")
    chat = Conversation(row=Row(file="x.jsonl", number=3, value={}), messages=CHAT)
    for _ in range(2):
        with pytest.raises(StageError, match=r"^x\.jsonl:3: rendering by the template of the mod"):
            renderer.of(chat, CHAT)
        renderer._apply = None  # type: ignore[assignment]
