"""`pipe clean`: what it removes of a run, what it never touches, and that a cut leaves a run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.checkpoint.store import LocalStore
from pipeline.cli import main
from pipeline.execution import clean, rundir
from pipeline.execution.journal import Journal
from tests.support.models import save_tokenizer, tiny_llama_config
from tests.support.pipe import Pipe
from tests.support.tiny_recipe import losses

STEPS = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of four steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("original")
    text, tokenizer = folder / "text.txt", folder / "tokenizer"
    text.write_text("a b c a b b c a\n" * 40, "utf-8")
    save_tokenizer(tokenizer)
    stages = {
        "model": {"use": "model.hf", "config": tiny_llama_config(), "tokenizer": str(tokenizer)},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {"use": "data.text", "files": [str(text)], "sequence_length": 8,
                 "cache": str(folder), "heldout_fraction": 0.1},
        "optimizer": {"use": "optimizer.adamw"},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded", "every": 1, "keep": None},
        "train": {"use": "train.causal_lm", "steps": STEPS, "global_batch_size": 2,
                  "eval_every": 1},
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": "export.safetensors"},
    }  # fmt: skip
    recipe = folder / "recipe.yaml"
    launch = {"procs": 1, "device": "cpu"}
    recipe.write_text(json.dumps({"name": "t", "launch": launch, "stages": stages}), "utf-8")
    pipe = Pipe(folder, folder)
    said = pipe.run(recipe)
    assert said.code == 0, said.stderr
    return pipe.run_dir


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """Return a copy of that run."""
    return Path(shutil.copytree(original, tmp_path / "the run", symlinks=True))


def cleaned(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["clean", *(str(each) for each in arguments)])


def steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints that are there."""
    return [int(name.removeprefix("step-")) for name in LocalStore(run / "checkpoints").names()]


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, but the lock's."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != rundir.LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def with_fields(run: Path, slot: str, **fields: Any) -> None:
    """Change fields of the run's recipe."""
    from pipeline.recipe import load_recipe

    recipe = load_recipe(run / "recipe.yaml").public()
    recipe["stages"][slot] |= fields
    (run / "recipe.yaml").write_text(json.dumps(recipe), "utf-8")


def test_without_yes_it_is_a_list(run: Path) -> None:
    before = files(run)
    (run / "checkpoints" / "step-00000007.tmp-abc").mkdir()
    (run / "checkpoints" / "step-00000007.tmp-abc" / "rank-00000").write_bytes(bytes(3_000_000))
    said = cleaned(run, f"{run}/../{run.name}")  # named twice, it counts once
    assert said.exit_code == 0
    lines = said.output.splitlines()
    assert lines[0] == f"{run}/../{run.name}:"
    assert lines[1].split() == ["3.0", "MB", "checkpoints/step-00000007.tmp-abc", "left", "over"]
    assert [line.split()[2:] for line in lines[2:5]] == [
        [f"checkpoints/step-0000000{step}", "superseded"] for step in (1, 2, 3)
    ]
    assert lines[5].startswith("4 items, ")
    assert lines[5].endswith("; --yes removes them")
    shutil.rmtree(run / "checkpoints" / "step-00000007.tmp-abc")
    assert files(run) == before


def test_superseded_checkpoints_go_and_all_else_stays(run: Path) -> None:
    before = files(run)
    said = cleaned(run, "--yes")
    assert said.exit_code == 0
    assert said.output.splitlines()[-1].startswith("removed 3 items, ")
    gone = [f"checkpoints/step-0000000{step}/" for step in (1, 2, 3)]
    assert files(run) == {
        name: content for name, content in before.items() if not name.startswith(tuple(gone))
    }
    assert cleaned(run, "--yes").output == "removed 0 items, 0 B\n"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"keep_every": 2}, [2, 4]),
        ({"keep_every": 3, "keep": 1}, [3, 4]),
        ({"keep": 3}, [4]),
        ({"keep_best": 2}, [3, 4]),  # the loss falls
    ],
)
def test_what_the_recipe_keeps_for_good_stays(
    run: Path, fields: dict[str, Any], kept: list[int]
) -> None:
    with_fields(run, "checkpoint", **fields)
    cleaned(run, "--yes")
    assert steps(run) == kept


def test_the_checkpoint_that_was_exported_stays(run: Path) -> None:
    journal = Journal(run / "journal.jsonl")
    done = journal.state().finished["train"]
    record = {**(done.record or {}), "checkpoint": str(run / "checkpoints" / "step-00000002")}
    journal.write("slot finished", slot="train", digest=done.digest, record=record)
    journal.write("run finished")
    cleaned(run, "--yes")
    assert steps(run) == [2, 4]


def test_all_checkpoints_of_an_exported_run(run: Path) -> None:
    export = files(run / "export")
    listed = cleaned(run, "--all-checkpoints").output.splitlines()
    assert [line.split()[-1] for line in listed if "step-" in line] == [
        *["superseded"] * 3, "exported",
    ]  # fmt: skip
    assert steps(run) == [1, 2, 3, 4]
    cleaned(run, "--all-checkpoints", "--yes")
    assert steps(run) == []
    assert files(run / "export") == export
    pipe = Pipe(run.parent, run.parent)
    assert pipe("verify", str(run)).code == 0
    again = pipe("resume", str(run))
    assert again.code == 0
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4]


def test_without_an_export_the_last_checkpoint_stays(run: Path) -> None:
    (run / "export" / "model.safetensors").unlink()
    said = cleaned(run, "--all-checkpoints", "--yes")
    assert "  its last checkpoint stays: there is no export of it" in said.output.splitlines()
    assert steps(run) == [4]


@pytest.mark.parametrize("arguments", [[], ["--yes"], ["--yes", "--all-checkpoints"]])
@pytest.mark.parametrize("job", [".", "exports/export-step-1"])
def test_a_run_under_way_or_being_exported_is_not_touched(
    run: Path, arguments: list[str], job: str
) -> None:
    """An export reads a checkpoint that later ones have superseded, and writes a partial model."""
    for folder in (job, "export-step-1.partial", "checkpoints/step-00000005.tmp-abc"):
        (run / folder).mkdir(parents=True, exist_ok=True)
    before = files(run)
    with rundir.locked(run / job):
        said = cleaned(run, *arguments)
    assert "0 items, 0 B" in said.output
    why = ["is being exported: all of it stays"]
    if job == ".":
        why = ["is in use by process" if "--yes" in arguments else "is under way"]
    assert [text in said.output for text in why] == [True]
    assert said.exit_code == 0
    assert files(run) == before
    assert (run / "checkpoints" / "step-00000005.tmp-abc").is_dir()


def test_an_export_that_begins_meanwhile_keeps_the_rest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = LocalStore.delete
    with contextlib.ExitStack() as stack:

        def begun(store: LocalStore, name: str) -> None:
            delete(store, name)
            job = run / "exports" / "out"
            job.mkdir(parents=True)
            stack.enter_context(rundir.locked(job))

        monkeypatch.setattr(LocalStore, "delete", begun)
        said = cleaned(run, "--yes")
    assert steps(run) == [2, 3, 4]
    assert "  an export has begun: the rest stays\nremoved 1 item, " in said.stdout
    assert said.exit_code == 1


def test_a_run_that_cannot_be_written_is_a_failure(run: Path) -> None:
    run.chmod(0o777)
    said = cleaned(run, "--yes")
    assert "  everybody can write in " in said.stdout
    assert (said.exit_code, steps(run)) == (1, [1, 2, 3, 4])


@pytest.mark.parametrize("event", ["run failed", "run started", "slot started"])
def test_of_an_unfinished_run_only_what_is_left_over_goes(run: Path, event: str) -> None:
    Journal(run / "journal.jsonl").write(event, slot="train")
    for name in ("step-00000005.tmp-abc", "step-00000001.deleted-77", "step-00000003.damaged-1"):
        (run / "checkpoints" / name).mkdir()
    (run / "recipe.yaml.tmp").write_text("cut sh", "utf-8")
    (run / "export.partial").mkdir()
    said = cleaned(run, "--yes", "--all-checkpoints")
    assert "  has not finished: its checkpoints stay" in said.output.splitlines()
    assert steps(run) == [1, 2, 3, 4]
    assert not (run / "recipe.yaml.tmp").exists()
    assert (run / "export.partial").is_dir()
    assert sorted(path.name for path in (run / "checkpoints").glob("*.*")) == [
        "step-00000003.damaged-1"
    ]


def test_no_link_is_followed(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run / "checkpoints" / "step-00000002", other)
    kept = files(other)
    for name in ("step-00000000", "step-00000009.tmp-abc"):
        (run / "checkpoints" / name).symlink_to(other)
    (run / "x.tmp").symlink_to(other)
    (run / "checkpoints" / "step-00000001" / "link").symlink_to(other)
    assert "is a link" not in cleaned(run, "--yes", "--all-checkpoints").output
    assert steps(run) == [0]  # the link
    assert files(other) == kept
    assert (run / "x.tmp").is_symlink()


def elsewhere(run: Path) -> None:
    (run / "checkpoints.at").write_text(str(run.parent / "other"), "utf-8")


def a_link(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "big disk")
    (run / "checkpoints").symlink_to(run.parent / "big disk")


def unreadable(run: Path) -> None:
    with_fields(run, "checkpoint", use="checkpoint.of_a_plugin")


@pytest.mark.parametrize(
    ("change", "why"),
    [(elsewhere, "not in its folder, and stay"), (a_link, "is a link"),
     (unreadable, "its checkpoints stay: ")],
)  # fmt: skip
def test_checkpoints_that_are_not_known_to_be_the_run_s_stay(
    run: Path, change: Callable[[Path], None], why: str
) -> None:
    change(run)
    assert why in cleaned(run, "--yes", "--all-checkpoints").output
    assert steps(run) == [1, 2, 3, 4]


def test_a_damaged_journal_keeps_all(run: Path) -> None:
    journal = run / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"train", b"trein", 1))
    before = files(run)
    assert "is not as it was written" in cleaned(run, "--yes").output
    assert files(run) == before


def test_what_cannot_be_removed_is_said_and_the_rest_goes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = LocalStore.delete

    def refused(store: LocalStore, name: str) -> None:
        if name.endswith("2"):
            raise PermissionError(errno.EACCES, "Permission denied", "a file")
        delete(store, name)

    monkeypatch.setattr(LocalStore, "delete", refused)
    before = steps(run)
    said = cleaned(run, "--yes")
    assert before == [1, 2, 3, 4]
    assert steps(run) == [2, 4]
    lines = said.stdout.splitlines()
    assert [line.split()[2] for line in lines[1:3]] == [f"checkpoints/step-{n:08d}" for n in (1, 3)]
    assert lines[3] == (
        "  checkpoints/step-00000002 could not be removed: Permission denied: a file"
    )
    assert lines[4].startswith("removed 2 items, ")
    assert (said.exit_code, said.stderr) == (1, "error: 1 failure: see above\n")


def test_without_names_all_runs_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = cleaned()
    assert (nothing.exit_code, nothing.output.splitlines()[0]) == (
        2, "error: there is no run in runs (name the folder of a run)",
    )  # fmt: skip
    for name in ("a", "b"):
        shutil.copytree(run, tmp_path / "runs" / name)
    said = cleaned("--yes")
    assert said.output.splitlines()[-1].startswith("removed 6 items, ")
    assert cleaned(tmp_path).exit_code == 2


class Killed(BaseException):
    """The end of the process at some system call."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function after which the call of that number that changes a folder kills."""
    calls = [-1]

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[0] -= 1
            if calls[0] == 0:
                raise Killed
            return real(*arguments, **named)

        return call

    def arm(number: int) -> None:
        calls[0] = number + 1

    for name in ("unlink", "rmdir", "rename"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return arm


def test_a_cut_at_every_call_leaves_whole_checkpoints(
    original: Path, tmp_path: Path, killed_at: Callable[[int], None]
) -> None:
    before = files(original / "checkpoints")
    cuts = 0
    for number in range(100):
        run = Path(shutil.copytree(original, tmp_path / str(number)))
        killed_at(number)
        try:
            clean.clean(run)
        except Killed:
            cuts += 1
        else:
            break
        finally:
            killed_at(-2)
        place = run / "checkpoints"
        assert steps(run)[-1] == STEPS
        for name in LocalStore(place).names():
            whole = {key: value for key, value in before.items() if key.startswith(name)}
            assert {f"{name}/{key}": value for key, value in files(place / name).items()} == whole
        clean.clean(run)
        assert [path.name for path in place.iterdir()] == [f"step-{STEPS:08d}"]
    assert cuts == 3 * (1 + 3 + 1)  # of each checkpoint: its new name, three files, its folder


def test_a_run_whose_cleaning_was_cut_goes_on(run: Path, killed_at: Callable[[int], None]) -> None:
    killed_at(6)  # in the second checkpoint
    with pytest.raises(Killed):
        clean.clean(run)
    assert steps(run)[-1] == STEPS
    said = Pipe(run.parent, run.parent)("resume", str(run), f"train.steps={STEPS + 1}")
    assert said.code == 0, said.stderr
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5]
