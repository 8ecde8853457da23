"""`pipe import`, used by a person and by a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.recipe import load_recipe

ARGUMENTS = {"output_dir": "tiny", "learning_rate": 1e-3, "per_device_train_batch_size": 2}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pipe(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["import", *arguments])


def write(name: str, content: object) -> None:
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")


def test_a_recipe_with_comments() -> None:
    write("args.json", ARGUMENTS)
    said = pipe("args.json", "-o", "r.yaml", "--procs", "2")
    assert said.exit_code == 3  # there is something to fill in
    assert said.stdout == ""
    assert load_recipe("r.yaml").stages["train"].fields == {
        "epochs": 3.0, "global_batch_size": 4, "micro_batch_size": 2,
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in Path("r.yaml").read_text("utf-8").splitlines()]
    assert "lr: 0.001 # learning_rate in args.json" in lines
    assert "epochs: 3.0 # transformers' default" in lines
    assert "use: consolidate.stream" in lines
    fill_in = "a folder (./model), a GGUF file or a hub id"
    assert f"use: model.hf # fill in `path`: {fill_in}" in lines
    assert said.stderr.splitlines() == [
        "args.json:",
        '  output_dir: tiny                translated  name = "tiny"',
        "  learning_rate: 0.001            translated  optimizer.lr = 0.001",
        "  per_device_train_batch_size: 2  translated  train.global_batch_size = 4, "
        "train.micro_batch_size = 2",
        f"fill in model.path: {fill_in}",
        "fill in data.files: text files, or use: data.chat for conversations",
        "3 keys: 3 translated, 0 by default, 0 not translated, 0 refused",
    ]


def test_a_recipe_on_stdout_lacks_what_its_check_says() -> None:
    write("args.json", ARGUMENTS)
    Path("r.yaml").write_text(pipe("args.json", "--procs", "2").stdout, "utf-8")
    checked = CliRunner().invoke(main, ["check", "r.yaml"])
    assert checked.exit_code == 2
    assert [line.split(": ")[1] for line in checked.stderr.splitlines()] == [
        "model.path", "data.files",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("report_to", "comet_ml", "  report_to: comet_ml  not translated"),
        ("optim", "adafactor", "  optim: adafactor  refused     'adafactor' is none of the "),
    ],
)
def test_a_setting_left_out_is_exit_code_3(key: str, value: str, line: str) -> None:
    write("args.yaml", f"output_dir: x\n{key}: {value}\n")
    said = pipe("args.yaml", "-o", "r.yaml")
    assert said.exit_code == 3
    assert Path("r.yaml").is_file()
    assert [each for each in said.stderr.splitlines() if each.startswith(line)]


def test_no_recipe_is_exit_code_2() -> None:
    write("a.yaml", "distributed_type: MEGATRON_LM\n")
    said = pipe("a.yaml", "-o", "r.yaml")
    assert said.exit_code == 2
    assert not Path("r.yaml").exists()
    assert "1 key: 0 translated, 0 by default, 0 not translated, 1 refused" in said.stderr


def test_json_for_programs() -> None:
    write("args.json", {**ARGUMENTS, "neftune_noise_alpha": 5})
    said = pipe("args.json", "--json", "--procs", "2")
    assert said.exit_code == 3
    assert said.stderr == ""
    told = json.loads(said.stdout)
    assert told["recipe"]["stages"]["optimizer"]["lr"] == 1e-3
    assert told["missing"].keys() == {"model.path", "data.files"}
    assert told["keys"][3] == {
        "file": "args.json", "key": "neftune_noise_alpha", "value": 5, "outcome": "refused",
        "to": {}, "why": "changes the training, and no recipe expresses it", "hint": "",
        "blocks": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "error: a.json: not JSON: "),
        ("a.json", '{"lr": 1, "lr": 2}', "error: a.json: `lr` is given twice"),
        ("a.yaml", "lr: 1\nlr: 2\n", "a.yaml:2:1: `lr` is given twice (first on line 1)"),
        ("a.yaml", "a: !!python/name:os.system\n", "a.yaml:1:4: tags such as "),
        ("a.yaml", "- 1\n", "error: a.yaml: does not map keys to values"),
        ("a.yaml", "some: thing\n", "error: a.yaml: its keys do not show which kind "),
        (
            "a.yaml",
            "use_cpu: true\nnum_machines: 1\n",
            "error: a.yaml: its keys do not ",
        ),
        ("a.json", "[" * 100_000, "error: a.json: not JSON: "),
    ],
)
def test_files_that_cannot_be_imported(name: str, content: str, message: str) -> None:
    write(name, content)
    said = pipe(name)
    assert said.exit_code == 2
    assert said.stderr.startswith(message)


def test_other_mistakes() -> None:
    assert pipe("none.json").stderr == "error: cannot read none.json: No such file or directory\n"
    write("args.json", ARGUMENTS)
    write("r.yaml", "name: mine\n")
    said = pipe("args.json", "-o", "r.yaml")
    assert said.exit_code == 2
    assert said.stderr == "error: r.yaml exists already (choose another file)\n"
    assert Path("r.yaml").read_text("utf-8") == "name: mine\n"


def test_importing_is_light() -> None:
    write("args.json", ARGUMENTS)
    program = (
        "import sys; from pipeline.cli import main\n"
        "try: main(['import', 'args.json'])\n"
        "except SystemExit: print(sorted(m for m in sys.modules if '.' not in m))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    modules = said.stdout.splitlines()[-1]
    assert "'pipeline'" in modules
    heavy = ("torch", "transformers", "accelerate", "deepspeed")
    assert not [name for name in heavy if f"'{name}'" in modules]
