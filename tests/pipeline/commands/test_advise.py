"""`pipe init`: answers as options and typed at prompts; what it writes is checked and planned.
`pipe advise` is tested in tests/pipeline/planning."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.commands.advise import recipe_name
from pipeline.contracts.metrics import records
from tests.pipeline.conftest import TinyRun
from tests.support.hub import FIRST, SECOND, serving
from tests.support.pipe import Pipe
from tests.support.terminal import Terminal

ON_CPUS = ("--full", "--seq", "16", "--gpus", "0", "--yes")


@pytest.fixture
def project(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model, `Tiny`, and data, to which the test moves."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.folder / "export", "Tiny")
    Path("data.jsonl").write_text('{"text": "Once upon a time"}\n' * 8)
    return tmp_path


def pipe(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def init(data: str, *options: str) -> Result:
    return pipe("init", "--model", "Tiny", "--data", data, *options)


def assert_good(recipe: str) -> dict[str, Any]:
    """Return a recipe that passes `pipe check` and fits by `pipe plan`."""
    assert pipe("check", recipe).exit_code == 0
    planned = pipe("plan", recipe)
    assert planned.exit_code == 0
    assert planned.stdout.startswith("fits: ")
    found: dict[str, Any] = yaml.safe_load(Path(recipe).read_text())
    return found


def test_options(project: Path) -> None:
    made = init("data.jsonl", *ON_CPUS)
    assert made.exit_code == 0, made.stderr
    assert made.stdout.endswith("it passes pipe check; next:\n  pipe run tiny.yaml\n")
    recipe = assert_good("tiny.yaml")
    assert recipe["name"] == "tiny"
    stages = recipe["stages"]
    assert stages["model"] == {"use": "model.hf", "path": "./Tiny"}
    assert stages["data"] == {
        "use": "data.text", "heldout_fraction": 0.05, "files": "./data.jsonl",
        "sequence_length": 16, "bad_rows": "error",
    }  # fmt: skip
    assert "adapter" not in stages
    again = init("data.jsonl", *ON_CPUS)
    assert again.exit_code == 2
    assert again.stderr == "error: tiny.yaml exists (name another file with --out)\n"


def test_answers_are_typed_and_bad_ones_are_asked_again(project: Path) -> None:
    terminal = Terminal(Pipe(project, project), "init", "--out", "mine.yaml", columns=100)
    said = 0

    def was_said(text: str) -> bool:
        """Whether a text stands behind those that were waited for before."""
        nonlocal said
        shown = "\n".join(terminal.text)
        at = shown.find(text, said)
        said = said if at < 0 else at + len(text)
        return at >= 0

    for question, answer in (
        ("Model: a folder, a hub id or a GGUF file:", "Tiny"),
        ("Data: a file of one JSON object a line:", "nothing.jsonl"),
        ("Error: File 'nothing.jsonl' does not exist.", ""),
        ("Data: a file of one JSON object a line:", "data.jsonl"),
        ("data: 8 rows of text in data.jsonl", ""),
        ("parameters, all weights can be trained", ""),
        ("Train low-rank updates only (LoRA) [y/N]:", "maybe"),
        ("Error: invalid input", ""),
        ("Train low-rank updates only (LoRA) [y/N]:", "yes"),
        ("GPUs of a node, 0 for CPUs [0]:", "0"),
    ):
        terminal.wait(partial(was_said, question))
        if answer:
            terminal.press(f"{answer}\n".encode())
    assert terminal.end() == 0, terminal.text
    assert terminal.display[-2:] == ["it passes pipe check; next:", "  pipe run mine.yaml"]
    recipe = assert_good("mine.yaml")
    assert recipe["name"] == "mine"
    stages = recipe["stages"]
    assert stages["adapter"]["use"] == "adapter.lora"
    assert stages["data"]["sequence_length"] == 64


def test_gpus_that_are_elsewhere(project: Path) -> None:
    made = init("data.jsonl", "--full", "--seq", "16", "--gpus", "2", "--gpu", "H100", "--yes")
    assert made.exit_code == 0, made.stderr
    found = yaml.safe_load(Path("tiny.yaml").read_text())
    assert found["launch"] == {"procs": 2, "device": "cuda"}
    assert found["stages"]["precision"]["compute"] == "bf16"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B@main", "llama-3.1-8b"),
        ("x/SmolLM2.Q4_1.gguf", "smollm2.q4_1"),
        ("Tiny", "tiny"),
        ("Tiny/config.json", "tiny"),
        ("Tiny/.", "tiny"),
        ("ä ö/é", "model"),
    ],
)
def test_a_recipe_has_one_name(model: str, name: str, project: Path) -> None:
    assert recipe_name(model) == name
    assert recipe_name(model, lora=True) == f"{name}-lora"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "error: say --model and --data (in a terminal, you are asked)"),
        (["--yes", "--model", "Tiny"], "error: say --data (in a terminal, you are asked)"),
        (["--model", "Tiny", "--data", "x"],
         "Error: Invalid value for '--data': File 'x' does not exist."),
        (["--model", "Tiny", "--data", "data.jsonl", "--seq", "0"],
         "Error: Invalid value for '--seq': 0 is not in the range x>=1."),
        (["--model", "Tiny", "--data", "data.jsonl", "--gpus", "0", "--gpu", "H100",
          "--nodes", "2"],
         "error: --gpu and --nodes: there are no GPUs (say --gpus N)"),
    ],
)  # fmt: skip
def test_mistakes(options: list[str], message: str, project: Path) -> None:
    refused = pipe("init", *options)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1] == message
    assert list(project.glob("*.yaml")) == []


def test_an_unknown_gpu(project: Path) -> None:
    refused = init("data.jsonl", "--full", "--seq", "16", "--gpus", "1", "--gpu", "Q5", "--yes")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --gpu Q5: no GPU of this name is known (known: A10, ")
    assert list(project.glob("*.yaml")) == []


WORDS = [
    "the", "model", "reads", "a", "row", "of", "text", "and", "learns", "to", "say", "the", "next",
    "word", "of", "it",
]  # fmt: skip


def conversations(count: int, broken: Sequence[int]) -> str:
    """Return lines of conversations; those of the numbers, from 0, are broken."""
    choose = random.Random(0)
    lines = []
    for number in range(count):
        said = " ".join(choose.choices(WORDS, k=choose.randint(2, 12)))
        row = {"messages": [{"role": "user", "content": "Go on."},
                            {"role": "assistant", "content": said}]}  # fmt: skip
        lines.append('{"messages": \n' if number in broken else f"{json.dumps(row)}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    ("name", "content", "trained", "held"),
    [
        ("x.jsonl", conversations(1, ()), "1 sample", 0),
        ("x.jsonl", conversations(3, (0, 2)), "1 sample", 0),
        ("x.jsonl", conversations(2, ()), "1 sample", 1),
        ("x.txt", "a" * 64, "1 sample", 0),
        ("x.txt", "a" * 65, "1 sample", 1),
        ("x.jsonl", '{"text": "aa"}\n', "1 sample", 0),
    ],
)
def test_little_data(name: str, content: str, trained: str, held: int, project: Path) -> None:
    Path(name).write_text(content)
    made = init(name, "--full", "--gpus", "0", "-y")
    assert made.exit_code == 0, made.stderr
    if not held:
        assert "heldout_fraction 0.0: the only sample is trained on" in made.stdout
        assert "eval_every null: there is nothing to evaluate on" in made.stdout
    checked = pipe("check", "tiny.yaml", "--data")
    assert checked.exit_code == 0, checked.stderr
    told = f"{trained} to train on, {held} held out" if held else f"{trained} to train on"
    assert told in checked.stdout


def test_a_question_that_a_recipe_would_misread(project: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]}
        for said in ("???", "./run.sh fails", "${HOME}?", "Why?")
    ]
    Path("x.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 3))
    made = init("x.jsonl", "--full", "--gpus", "0", "-y")
    assert made.exit_code == 0, made.stderr
    train = yaml.safe_load(Path("tiny.yaml").read_text())["stages"]["train"]
    assert train.get("generate", {"prompts": ["Why?"]})["prompts"] == ["Why?"]


def test_a_run_of_what_init_wrote(project: Path, plugin: Path) -> None:
    """300 rows, seven of them broken, from another folder; the recipe moves with its own."""
    Path("mine/data").mkdir(parents=True)
    Path("mine/data/rows.jsonl").write_text(conversations(300, (0, 9, 50, 120, 121, 200, 299)))
    shutil.move("Tiny", "mine/Tiny")
    made = pipe(
        "init", "--model", "mine/Tiny", "--data", "mine/data/rows.jsonl", "--out", "mine/x.yaml",
        "--gpus", "0", "-y",
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    said = made.stdout.splitlines()
    assert said[:2] == [
        "data: 300 rows of chat messages in rows.jsonl, 7 of them broken",
        "  7 rows: not JSON: Expecting value at column 14 (first: rows.jsonl:1)",
    ]
    for line in (
        "bad_rows drop: 7 broken rows are left out and reported",
        "lr 0.0001: all weights of a model below 1B parameters (0.0002 for LoRA)",
        "weight_decay 0.1: all weights (0 for LoRA)",
        "compute fp32: most CPUs only emulate bf16",
        "procs 1: one process uses all cores; each further one takes as much memory again",
        "export.dtype bf16: half the size of fp32, as most models have it",
        "heldout_fraction 0.05: 15 samples to evaluate on",
        "epochs 3: 278 samples to train on",
        "global_batch_size 8: 35 steps an epoch, 105 steps in all",
        "eval_every 10: 12 evaluations, the first before training",
        "checkpoint.every 20: 6 checkpoints; the last two are kept",
        "chat_template plain: the tokenizer has none",
    ):
        assert line in said
        assert f"# {line}" in Path("mine/x.yaml").read_text()
    assert any(line.startswith("full: ") for line in said)
    Path("mine").rename("moved")
    assert_good("moved/x.yaml")
    checked = pipe("check", "moved/x.yaml", "--data")
    assert checked.exit_code == 0, checked.stderr
    assert "data: 278 samples to train on, 15 held out" in checked.stdout
    run = Pipe(plugin, project)("run", "moved/x.yaml", "--run-dir", "run", "launch.threads=1")
    assert run.code == 0, run.stderr
    ends = [line.split() for line in run.stdout.splitlines()]
    assert ["checkpoint", "run/checkpoints/step-00000105"] in ends
    metrics = [*records(Path("run/metrics.jsonl"))]
    losses = [one["eval_loss"] for one in metrics if "eval_loss" in one]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert max(one["step"] for one in metrics) == 105
    assert [step.name for step in sorted(Path("run/checkpoints").glob("step-*"))] == [
        "step-00000100", "step-00000105",
    ]  # fmt: skip


def test_a_model_of_the_hub(tiny_run: TinyRun, plugin: Path, tmp_path: Path) -> None:
    """Its tokenizer is fetched at one commit, and its weights are not."""
    (tmp_path / "rows.jsonl").write_text(conversations(30, ()))
    with serving() as hub:
        hub.add("tiny/model", tiny_run.folder / "export", main=FIRST, v1=SECOND)
        pipe = Pipe(plugin, tmp_path)
        arguments = ("--data", "rows.jsonl", "--gpus", "0", "-y", "--out", "x.yaml")
        command = ("-m", "pipetrain", "init", "--model", "tiny/model@v1", *arguments)
        made = pipe.end(pipe.start(*command, **hub.environment(tmp_path / "cache")))
    assert made.code == 0, made.stderr
    assert made.stderr.count(f"model: tiny/model is v1 at {SECOND}") == 1
    model = yaml.safe_load((tmp_path / "x.yaml").read_text())["stages"]["model"]
    assert model == {
        "use": "model.hf", "path": "tiny/model", "revision": "v1", "chat_template": "plain",
    }  # fmt: skip
    fetched = {line.rpartition("/")[2] for line in hub.requests if "/resolve/" in line}
    assert "tokenizer.json" in fetched
    assert not any(name.endswith(".safetensors") for name in fetched)
