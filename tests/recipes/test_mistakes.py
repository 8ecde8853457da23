"""Mistakes that people make, each led to its line and its fix in one step, in under a second.

`mistakes.yaml` has them: names of other tools, slots, YAML, values, paths, the command line, data
rows and folders of models. Of all of them at most `MOST_WEAK` have a message without the fix.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.stages.data.fakes import byte_tokenizer
from tests.support.command import pipe
from tests.support.runs import TINY

RECIPE = """\
name: assistant
launch: {procs: 1, device: cpu}
stages:
  model:
    use: model.hf
    path: ./model
  precision: {use: precision.policy, compute: bf16}
  data:
    use: data.chat
    files: ./chat.jsonl
    sequence_length: 64
  optimizer:
    use: optimizer.adamw
    lr: 2.0e-4
  wrap: {use: wrap.fsdp}
  checkpoint: {use: checkpoint.sharded, every: 10}
  train:
    use: train.causal_lm
    epochs: 3
    global_batch_size: 8
    micro_batch_size: 1
  consolidate: {use: consolidate.stream}
  export: {use: export.safetensors}
"""
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
LEAST = 290
MOST_WEAK = 2


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake, and what its message has to lead to."""

    mistake: str
    old: str = ""
    new: str = ""
    command: str | list[str] = "check r.yaml"
    files: Mapping[str, str | None] = field(default_factory=dict)
    """File -> content, or nothing for one that is missing."""
    place: str = ""
    fix: str = ""
    weak: bool = False

    @property
    def recipe(self) -> str:
        assert RECIPE.count(self.old) == 1 or not self.old
        return RECIPE.replace(self.old, self.new) if self.old else RECIPE

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command) if isinstance(self.command, str) else self.command


TABLE = Path(__file__).with_name("mistakes.yaml").read_text("utf-8")
MISTAKES = [Mistake(**entry) for entry in yaml.safe_load(TABLE)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, data, two recipes and a run, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("project")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    config = TINY | {"vocab_size": 260, "eos_token_id": 256}
    (folder / "model/config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    model.save_pretrained(folder / "model")
    (folder / "chat.jsonl").write_text(f"{json.dumps(ROW)}\n" * 20)
    (folder / "table.csv").write_text("question,answer\na,b\n")
    (folder / "data").mkdir()
    (folder / "data/train.json").write_text("[]")
    (folder / "r2.yaml").write_text(RECIPE)
    run = folder / "runs/assistant"
    (run / "logs").mkdir(parents=True)
    (run / "logs/rank-00000.log").write_text("started\n")
    (run / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def here(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the project as the current folder."""
    shutil.copytree(project, tmp_path, dirs_exist_ok=True, copy_function=os.link)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write(file: Path, text: str | None) -> None:
    """Write a file of the copy without changing the project's, to which it is linked."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_bytes(text.encode("latin-1" if text.startswith("\xff") else "utf-8"))


def said(words: list[str], folder: Path) -> list[str]:
    """Return the lines that a command refuses its arguments with, without click's usage."""
    refused = pipe(*words)
    assert refused.exit_code == 2, refused.output
    lines = refused.output.replace(f"{folder}/", "").splitlines()
    return [line for line in lines if line and not line.startswith(("Usage:", "Try "))]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.mistake)
def test_the_first_line_leads_to_the_fix(mistake: Mistake, here: Path) -> None:
    write(here / "r.yaml", mistake.recipe)
    for name, text in mistake.files.items():
        write(here / name, text)
    begun = time.process_time()
    first = said(mistake.words, here)[0]
    assert time.process_time() - begun < 1
    assert first.startswith(mistake.place)
    assert "Traceback" not in first
    assert mistake.weak or mistake.fix in first, first


def test_few_messages_are_weak() -> None:
    names = [mistake.mistake for mistake in MISTAKES]
    assert len(names) == len(set(names)) >= LEAST
    assert all(mistake.fix or mistake.weak for mistake in MISTAKES)
    assert sum(mistake.weak for mistake in MISTAKES) <= MOST_WEAK


def test_the_project_itself_has_no_mistake(here: Path) -> None:
    write(here / "r.yaml", RECIPE)
    checked = pipe("check", "r.yaml", "--data")
    assert checked.exit_code == 0, checked.output
