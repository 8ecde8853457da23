"""The package of docs/writing-a-stage.md: built, installed, explained, checked, used in a training,
uninstalled."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import PreTrainedTokenizerFast

from tests.plugins.conftest import DOCUMENT, Environment
from tests.stages.data.fakes import byte_tokenizer
from tests.support.exports import stored
from tests.support.models import filled, random_source
from tests.support.plugins import files_in, sessions_in
from tests.support.runs import TINY

CONFIG = TINY | {"vocab_size": 260, "eos_token_id": 256}
LENGTH, BATCH, SEED = 16, 4, 5
TEXT = "A stage is one step of a recipe, and a recipe is a chain of stages. " * 3
SESSIONS = sessions_in(DOCUMENT)


@pytest.fixture
def project(tmp_path: Path, package: Path) -> Path:
    """Return a folder with the document's recipe, the recipe that it extends, a tokenizer and a
    text."""
    folder = tmp_path / "project"
    folder.mkdir()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "quickstart.yaml").write_text(yaml.safe_dump(quickstart(), sort_keys=False))
    recipe = (package / "sgd.yaml").read_text("utf-8")
    (folder / "sgd.yaml").write_text(recipe, encoding="utf-8")
    return folder


def quickstart() -> dict[str, object]:
    stages = {
        "model": {"use": "model.hf", "config": CONFIG, "tokenizer": "./tokenizer"},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {
            "use": "data.text", "files": "./text.txt", "sequence_length": LENGTH,
            "cache": "./cache",
        },
        "optimizer": {"use": "optimizer.adamw", "warmup_steps": 2},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {
            "use": "train.causal_lm", "steps": 2, "global_batch_size": BATCH, "shuffle": False
        },
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": "export.safetensors", "dtype": "fp32"},
    }  # fmt: skip
    launch = {"procs": 1, "device": "cpu"}
    return {"name": "quickstart", "seed": SEED, "launch": launch, "stages": stages}


def test_the_document_is_about_the_files(package: Path, wheel: Path) -> None:
    assert files_in(DOCUMENT).keys() == {
        "pyproject.toml", "pipetrain_sgd.py", "sgd.yaml", "test_sgd.py"
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read("pipetrain_sgd.py").decode()
    assert packed == (package / "pipetrain_sgd.py").read_text("utf-8")


def test_it_is_explained(scratch: Environment, project: Path) -> None:
    shown = scratch.pipe("stages", "optimizer.sgd", cwd=project)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == SESSIONS["pipe stages optimizer.sgd"]
    listed = scratch.pipe("stages", "--json", cwd=project)
    (found,) = [each for each in json.loads(listed.stdout) if each["name"] == "optimizer.sgd"]
    assert (found["distribution"], found["version"]) == ("pipetrain-sgd", "0.1.0")
    assert found["summary"].startswith("Declare SGD with momentum")


def test_a_recipe_with_it_is_checked(scratch: Environment, project: Path) -> None:
    good = scratch.pipe("check", "sgd.yaml", cwd=project)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("ok: quickstart-sgd: 9 stages: model.hf -> ")
    assert " -> optimizer.sgd -> " in good.stdout


def test_mistakes_in_its_fields_are_placed(scratch: Environment, project: Path) -> None:
    recipe = (project / "sgd.yaml").read_text("utf-8")
    typos = recipe.replace("momentum:", "momentun:").replace("lr: 0.05", "lr: fast")
    (project / "typo.yaml").write_text(typos, encoding="utf-8")
    checks = {command: out for command, out in SESSIONS.items() if "check" in command}
    assert len(checks) == 2
    for command, expected in checks.items():
        bad = scratch.pipe(*command.split()[1:], cwd=project)
        assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", expected)


def test_its_own_tests_pass(scratch: Environment, package: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error"]
    done = scratch.run("-m", "pytest", *options, "test_sgd.py", cwd=package)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(
    "overrides",
    [(), pytest.param(("wrap.use=wrap.zero",), marks=pytest.mark.full)],
    ids=["replicated", "sharded"],
)
def test_it_trains_by_its_rule(
    overrides: tuple[str, ...], scratch: Environment, project: Path
) -> None:
    done = scratch.pipe("run", "sgd.yaml", *overrides, "--run-dir", "run", cwd=project)
    assert done.returncode == 0, done.stderr
    facts = json.loads((project / "run" / "engine.json").read_text("utf-8"))
    assert facts["optimizer"] == "SGD"
    losses, weights = by_hand(project)
    lines = (project / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [
        record["loss"] for record in map(json.loads, lines) if "loss" in record
    ] == pytest.approx(losses, rel=1e-5)
    assert losses[0] == pytest.approx(math.log(CONFIG["vocab_size"]), abs=0.1)  # untrained
    exported = stored(project / "run" / "export")
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)
    assert "model.layers.0.self_attn.q_proj.weight" in exported


def by_hand(project: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of v = 0.9 v + g, w = w - 0.05 v over two steps in file
    order."""
    model = filled(random_source(CONFIG, project, seed=SEED)).train()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(project / "tokenizer")
    stream = torch.tensor([*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id])
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    losses = []
    for step in range(2):
        span = stream[step * BATCH * LENGTH : (step + 1) * BATCH * LENGTH + 1]
        logits = model(span[:-1].view(BATCH, LENGTH)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), span[1:])
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                velocity[name].mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.05 * velocity[name])
    return losses, model.state_dict()


def test_without_it_the_recipe_is_refused(tmp_path: Path, project: Path) -> None:
    gone = Environment(tmp_path / "environment").pipe("check", "sgd.yaml", cwd=project)
    assert gone.returncode == 2
    assert gone.stderr == (
        "sgd.yaml:5:10: optimizer.use: there is no stage `optimizer.sgd` "
        "(did you mean `optimizer.adamw`? optimizer stages: optimizer.adamw, optimizer.lion, "
        "optimizer.none; or install its package into this environment)\n"
    )
