"""Tasks of lm-eval, where it is installed, in separate processes because it changes global
configuration."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.models import filled, random_source, save_tokenizer, tiny_llama_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"
)
TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
PROGRAM = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from pipeline.errors import StageError
from stages.evaluate.run import run_tasks
folder, task = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
try:
    print(json.dumps(run_tasks(model, tokenizer, [task], folder=folder, batch_size=2)))
except StageError as error:
    print(json.dumps(str(error)))
"""
TEXTS = ["a b", "c", "b c a", "a a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its tokenizer, and a task."""
    folder = tmp_path_factory.mktemp("tasks")
    filled(random_source(tiny_llama_config(), folder)).save_pretrained(folder)
    save_tokenizer(folder)
    rows = [{"text": text, "choices": ["a", "b", "c"], "answer": 1} for text in TEXTS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "tiny.yaml").write_text(TASK.replace("ROWS", str(folder / "rows.jsonl")))
    return folder


def said(folder: Path, task: str) -> object:
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), task]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_task_gives_the_numbers_of_a_plain_computation(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    choices = tokenizer("a b c")["input_ids"]
    right = 0
    for text in TEXTS:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        right += int(logits[choices].argmax()) == 1
    told = said(folder, "tiny_choice")
    assert isinstance(told, dict)
    assert told["tiny_choice"]["acc,none"] == right / len(TEXTS)
    assert told["tiny_choice"]["version"] == "Yaml"


def test_an_unknown_task_is_named(folder: Path) -> None:
    assert said(folder, "tiny_choise") == (
        "lm_eval knows no task `tiny_choise` (lm_eval ls tasks lists them)"
    )


@pytest.mark.parametrize("hostile", ["function", "template", "include"])
def test_definitions_of_tasks_run_commands(folder: Path, tmp_path: Path, hostile: str) -> None:
    """So `task_folder` takes --trust-remote-code: test_lm.py."""
    mark = tmp_path / "ran"
    text = (folder / "tiny.yaml").read_text().replace("tiny_choice", f"hostile_{hostile}")
    (folder / "hostile.py").write_text(
        f"import os\nos.system('touch {mark}')\ndef text(row): return row['text']\n"
    )
    template = f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"
    given = {
        "function": text.replace('"{{text}}"', "!function hostile.text"),
        "template": text.replace('"{{text}}"', json.dumps(template)),
        "include": f"include: {tmp_path}/other.yaml\ntask: hostile_include\n",
    }
    (tmp_path / "hostile.py").write_text((folder / "hostile.py").read_text())
    (tmp_path / "other.yaml").write_text(given["function"])
    (folder / "hostile.yaml").write_text(given[hostile])
    said(folder, f"hostile_{hostile}")
    (folder / "hostile.yaml").unlink()
    assert mark.exists()
