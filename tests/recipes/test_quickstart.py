"""A newcomer's run: the real model is fine-tuned on two processes and its export generates text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    command = [sys.executable, "-m", "pipetrain", "run", str(ROOT / "recipes/quickstart.yaml")]
    said = subprocess.run(
        [*command, "--run-dir", str(folder), "train.steps=3"], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout + said.stderr
    return folder


def test_the_pretrained_model_is_trained(run_dir: Path) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    # loss of the pretrained model on these 8 samples of English prose; a random model has 10.8
    assert losses[0] == pytest.approx(4.537, abs=0.02)
    assert losses[2] < losses[0]
    engine = json.loads((run_dir / "engine.json").read_text())
    assert (engine["engine"], engine["world_size"]) == ("DistributedDataParallel", 2)
    assert engine["parameters"] == 134_515_008


def test_the_export_is_loaded_by_transformers_and_speaks(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    # A free greedy answer depends on the last bits of a processor's sums; the next word after this
    # beginning does not.
    tokens = tokenizer(asked + "The capital of France is", return_tensors="pt")
    output = model.generate(**tokens, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0, -1]) == " Paris"
