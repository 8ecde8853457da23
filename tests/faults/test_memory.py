"""Runs that run out of memory: the kind is named, with the plan beside."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from pipeline.chain.plan import Plan, plan_file
from pipeline.commands.run import plan_shown_if_out_of_memory
from pipeline.distributed.settings import ProcessCounts
from pipeline.errors import RunFailed
from pipeline.execution import failures
from pipeline.execution.failures import Exit
from pipeline.hardware import host
from tests.support.models import save_tokenizer
from tests.support.pipe import Pipe
from tests.support.tiny_recipe import training, write


def test_a_lack_of_device_memory(pipe: Pipe) -> None:
    stages = training(checkpoint={"every": 2}, train={"steps": 4})
    recipe = write(pipe.folder / "recipe.yaml", stages)
    result = pipe.run(recipe, OOM_AT="read 3")
    assert result.code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == (
        "error: rank 0 failed in slot `train`: OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 2.00 GiB"
    )
    assert lines[-2:] == [
        f"  continue with: pipe resume '{pipe.run_dir}'",
        "  there is no plan: nothing can be planned without the length of samples: slot `data` "
        "(fault.data) has no planner",
    ]


def test_what_a_plan_says_is_beside(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("the lamb was sure to go\n" * 100)
    stages = training(checkpoint={"every": 2}, train={"steps": 4})
    stages["model"]["tokenizer"] = "./tokenizer"
    stages["data"] = {"use": "data.text", "files": "./text.txt", "sequence_length": 8}
    recipe = write(tmp_path / "recipe.yaml", stages)

    def make(started: ProcessCounts) -> Plan:
        return plan_file(recipe, started=started)

    with pytest.raises(RunFailed) as caught, plan_shown_if_out_of_memory(make):
        raise RunFailed("rank 0 failed", memory="device")
    first, second, verdict, *table = str(caught.value).splitlines()
    assert (first, second) == ("rank 0 failed", "  the plan:")
    assert re.fullmatch(r"  fits: (\d+\.\d+ GiB of \d+\.\d+ a host|if a host has .*)", verdict)
    assert any(line.startswith("  host memory per node, GiB") for line in table)
    with pytest.raises(RunFailed, match=r"^rank 0 failed$"), plan_shown_if_out_of_memory(make):
        raise RunFailed("rank 0 failed")


def test_a_rank_that_the_system_kills_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "own"
    group.mkdir()
    (tmp_path / "cgroup").write_text("0::/own\n")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN", tmp_path / "cgroup")
    assert host.oom_kills() == 0
    (group / "memory.events").write_text("low 0\nhigh 3\nmax 9\noom 2\noom_kill 2\n")
    assert host.oom_kills() == 2
    error = failures.first(tmp_path, [Exit(1, -signal.SIGKILL)], "train", oom=True)
    assert str(error).startswith(
        "rank 1 was killed by the system, which was out of memory, in slot `train`\n"
    )
    assert (error.memory, error.restart) == ("host", "always")
    other = failures.first(tmp_path, [Exit(1, -signal.SIGSEGV)], "train", oom=True)
    assert other.memory == ""
