"""Secrets of the environment, and of addresses, are in nothing that a run writes or shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.pipe import Pipe

SECRETS = {
    "HF_TOKEN": "hf_canaryCanary01",
    "AWS_SECRET_ACCESS_KEY": "aws/canary+Canary02",
    "WANDB_API_KEY": "wandbcanary03wandb",
    "DB_PASSWORD": "canary 04 with spaces",
    "MY_SETTING": "s3://user05:canary05@bucket/x",
}
UNNAMED = {
    "GITHUB_PAT": "ghp_canaryCanary06",
    "WEBHOOK": "https://hooks.example/services/T0/canary07",
    "PGPASS": "canary08",
    "DB_PW": "canary-09",
    "PROXY_AUTHORIZATION": "Basic Y2FuYXJ5MTA=",
    "MY_MYSTERY": "canary11canary",
    "SOME_LICENCE": "-----BEGIN-----\ncanary12canary12canary12\n-----END-----\n",
}
"""Secrets whose variables say so in words of their own, or not at all."""
CANARIES = (
    "hf_canary", "canary+", "wandbcanary", "canary 04", "user05", "canary05", "ghp_canary",
    "canary07", "canary08", "canary-09", "Y2FuYXJ5", "canary11", "canary12",
)  # fmt: skip


def leaks(place: Path) -> list[str]:
    """Return the files under `place` with a canary in them."""
    texts = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    return [
        f"{path.name}: {canary}"
        for path, text in texts.items()
        for canary in CANARIES
        if canary.encode() in text
    ]


def failed(pipe: Pipe, rank: int, secrets: dict[str, str]) -> str:
    """Return the errors of a run in which a rank tells all variables, without any canary."""
    recipe = pipe.recipe(procs=2, train={"fault": "leak", "rank": rank})
    result = pipe.run(recipe, **secrets, LEAK=" ".join(secrets))
    assert result.code == 1
    for canary in CANARIES:
        assert canary not in result.stdout + result.stderr
    assert leaks(pipe.run_dir) == []
    return result.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_values_that_are_not_known_to_be_harmless(pipe: Pipe, rank: int) -> None:
    harmless = {"NCCL_IB_HCA": "harmless=mlx5", "SLURM_JOB_NAME": "harmless-9"}
    said = failed(pipe, rank, UNNAMED | harmless)
    told = "ValueError: $GITHUB_PAT and $WEBHOOK and $PGPASS and $DB_PW and $PROXY_AUTHORIZATION "
    assert told + "and $MY_MYSTERY and" in said
    assert "harmless=mlx5 and harmless-9" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_canaries_of_a_stage_that_tells_all(pipe: Pipe, rank: int) -> None:
    said = failed(pipe, rank, SECRETS)
    assert "ValueError: $HF_TOKEN and $AWS_SECRET_ACCESS_KEY and " in said
    assert "s3://***@bucket/x" in said
    problem = [event for event in pipe.events() if event["event"] == "run failed"][-1]["problem"]
    assert "$DB_PASSWORD" in problem
    log = (pipe.run_dir / "logs" / f"rank-{rank:05d}.log").read_text()
    assert log.count("with $WANDB_API_KEY") == 2
    for command in (["ls", "--json", str(pipe.folder)], ["inspect", str(pipe.run_dir)]):
        shown = pipe(*command, **SECRETS)
        assert not any(canary in shown.stdout + shown.stderr for canary in CANARIES)


def test_what_people_have_typed_is_shown(pipe: Pipe) -> None:
    """Here the job's name is part of the run's folder, of an override and of the recipe."""
    recipe = pipe.recipe(export={"suffix": "exp-42b"}, train={"fault": "raise"})
    folder = pipe.folder / "runs" / "exp-42b"
    result = pipe(
        "run", str(recipe), "declare.text=exp-42b", "--run-dir", str(folder), "--json",
        JOB_NAME="exp-42b", BUILD="1732800000", OTHER="exp-43b",
    )  # fmt: skip
    assert result.code == 1
    assert f"continue with: pipe resume {folder}" in result.stderr.replace("'", "")
    assert all(json.loads(line) for line in result.stdout.splitlines())
    facts = json.loads((folder / "environment.json").read_text())
    assert "declare.text=exp-42b" in facts["command"]
    written = [*folder.rglob("*.log"), *folder.rglob("*.json*"), folder / "report.html"]
    assert [file.name for file in written if "$JOB_NAME" in file.read_text()] == []
    report = pipe("report", str(folder), JOB_NAME="exp-42b")
    assert report.stdout == f"{folder}/report.html\n"


def test_canaries_on_the_command_line(pipe: Pipe) -> None:
    """The variable's value, given as an override, is in the merged recipe alone: as written."""
    result = pipe(
        "run", str(pipe.recipe()), f"declare.text={SECRETS['WANDB_API_KEY']}", "--run-dir",
        str(pipe.run_dir), **SECRETS,
    )  # fmt: skip
    assert result.code == 0, result.stderr
    assert leaks(pipe.run_dir) == ["recipe.yaml: wandbcanary"]
    command = json.loads((pipe.run_dir / "environment.json").read_text())["command"]
    assert "declare.text=$WANDB_API_KEY" in command


@pytest.mark.parametrize(
    "command",
    [["check"], ["show"], ["plan"], ["bench"], ["launch", "--target", "slurm", "--run-dir", "r",
                                                "--print"]],
    ids=lambda command: command[0],
)  # fmt: skip
def test_canaries_in_what_commands_show_of_a_recipe(pipe: Pipe, command: list[str]) -> None:
    """A file is named after a variable that the recipe lists, and is not there."""
    model = {"use": "model.hf", "config": {"model_type": "llama"}, "tokenizer": "./none"}
    data = {"use": "data.text", "files": "./${oc.env:WANDB_API_KEY}", "sequence_length": 8}
    recipe = {"name": "told", "env": ["WANDB_API_KEY"], "stages": {"model": model, "data": data}}
    path = pipe.folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    result = pipe(command[0], str(path), *command[1:], **SECRETS)
    told = result.stdout + result.stderr
    assert "WANDB_API_KEY" in told
    assert not any(canary in told for canary in CANARIES)
