"""Stages that a resumed run repeats, and stages that it does not."""

from __future__ import annotations

from tests.support.pipe import Pipe


def test_a_finished_train_is_not_repeated_to_redo_an_export(pipe: Pipe) -> None:
    recipe = pipe.recipe(export={"fault": "raise"})
    failed = pipe.run(recipe)
    assert failed.code == 1
    assert "error: rank 0 failed in slot `export`: ValueError: boom\n" in failed.stderr
    assert pipe.calls() == ["declare", "train", "export", "closed declare"]
    (pipe.run_dir / "repaired").touch()
    (pipe.run_dir / "calls.txt").unlink()
    resumed = pipe("resume", str(pipe.run_dir))
    assert resumed.code == 0, resumed.stderr
    assert resumed.stdout.startswith("continues (2 of 4 slots done)\n")
    assert pipe.calls() == ["declare", "export", "report", "closed declare"]
    assert (pipe.run_dir / "export.txt").read_text() == "trained exported"


def test_what_nobody_reads_any_more_is_not_rebuilt(pipe: Pipe) -> None:
    assert pipe.run(pipe.recipe()).code == 0
    (pipe.run_dir / "calls.txt").unlink()
    changed = pipe("resume", str(pipe.run_dir), "export.suffix=ed")
    assert changed.code == 0, changed.stderr
    assert pipe.calls() == ["export"]
    assert (pipe.run_dir / "export.txt").read_text() == "trained exporteded"


def test_a_finished_run_has_nothing_to_do_and_needs_no_torch(pipe: Pipe) -> None:
    run = pipe.run(pipe.recipe())
    assert run.code == 0, run.stderr
    end, *results = run.stdout.splitlines()[-5:]
    assert end.startswith("finished in 0:")
    name = pipe.run_dir.name
    assert results == [
        f"  run folder  {name}",
        f"  train       {name}/train.txt",
        f"  export      {name}/export.txt",
        f"  report      {name}/report.html",
    ]
    before = pipe.calls()
    code = "import sys; sys.modules['torch'] = None; from pipeline.cli import main; main()"
    again = pipe.end(pipe.start("-c", code, "resume", str(pipe.run_dir)))
    assert again.code == 0, again.stderr
    assert again.stdout.startswith("nothing to do: every stage has finished\n")
    assert pipe.calls() == before
