"""benchmarks/export.py on a tiny model, and the numbers that it compares with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.location import open_checkpoint
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.wrap.fsdp import Fsdp
from stages.wrap.zero import Zero
from tests.support.processes import run_ranks
from tests.support.runs import context

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WRAPS: dict[str, Any] = {"fsdp": Fsdp(), "zero3": Zero(stage=3)}


def start(program: str, *options: str) -> list[dict[str, Any]]:
    """Run the program; return the rows of its JSON."""
    file = Path(options[-1])
    command = [sys.executable, str(BENCHMARKS / program), "--shape", "tiny"]
    ended = subprocess.run(
        [*command, *options[:-1], "--repeats", "1", "--json", str(file)],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| --- |" in ended.stdout
    found: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["rows"]
    return found


@pytest.mark.full
def test_exports_are_measured_and_agree(tmp_path: Path) -> None:
    only = ["--groups", "zero3", "--only", "write, of zero3, 2"]
    found = start("export.py", *only, str(tmp_path / "all.json"))
    assert [len(row["processes"]) for row in found] == [1, 2]


def save(dist: DistContext, folder: str, config: dict[str, Any]) -> None:
    """Save a real checkpoint under each strategy."""
    for name, wrap in WRAPS.items():
        ctx = context(dist, Path(folder, name))
        source = HfModel(config=config, init="random").run(ctx)
        precision = PrecisionPolicy(compute="fp32").run(ctx)
        engine = wrap.run(ctx, source, precision, AdamW().run(ctx))
        kept: Any = ShardedCheckpoint().run(ctx, engine)
        kept.save(Progress(step=10))
        kept.finish()
        kept.close()


def placed(folder: Path) -> dict[tuple[str, int, int], tuple[str, int]]:
    """Return the file of each part of a tensor, and its place behind the header, random states left
    out."""
    reader = CheckpointReader(*open_checkpoint(str(folder)))
    found = {}
    for key, tensor in reader.tensors.items():
        for piece in reader.places.find(key, Tile(0, tensor.numel))[1]:
            if not key.startswith("random/"):
                file = reader.manifest.files[piece.file]
                place = file.name, piece.place.start - file.data_start
                found[key, piece.tile.start, piece.tile.stop] = place
    reader.close()
    return found


def test_checkpoints_are_laid_out_as_two_ranks_save_them(tmp_path: Path) -> None:
    from apart.child import Place
    from exporters import canonical
    from shapes import SHAPES

    config = dict(SHAPES["tiny"])
    run_ranks(save, 2, str(tmp_path / "real"), config)
    for strategy in WRAPS:
        folder = tmp_path / "made" / strategy
        job = {"config": config, "strategy": strategy, "folder": str(folder), "ranks": 2}
        canonical.write(job, Place(rank=0, world=1, folder=tmp_path))()
        real = placed(tmp_path / "real" / strategy / "checkpoints" / "step-00000010")
        assert placed(folder / "step-00000010") == real


def test_numbers_are_the_same_however_they_are_cut() -> None:
    import values

    size = values.BLOCK + 1000
    whole = values.array("weight/a", 0, size)
    parts = [
        values.array("weight/a", *edges) for edges in ((0, 7), (7, size - 3), (size - 3, size))
    ]
    assert np.array_equal(whole, np.concatenate(parts))
    assert not np.array_equal(whole, values.array("weight/b", 0, size))


@pytest.mark.parametrize("harm", ["moved", "missing", "more", "none"])
def test_a_wrong_output_is_found(tmp_path: Path, harm: str) -> None:
    import values
    from exporters import plain
    from exporters.trained import trained
    from shapes import SHAPES, count

    shapes = trained(SHAPES["tiny"]).shapes
    tensors = {
        name: torch.from_numpy(values.array(f"weight/{name}", 0, count({name: shape}))).view(shape)
        for name, shape in shapes.items()
    }
    name = next(iter(tensors))
    if harm == "moved":
        tensors[name] = tensors[name].roll(1)
    elif harm == "missing":
        del tensors[name]
    elif harm == "more":
        tensors["lm_head.weight"] = tensors[name].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    wrong = plain.wrong(tmp_path, plain.expected(SHAPES["tiny"]))
    assert wrong == {"more": ["lm_head.weight"], "none": []}.get(harm, [name])


def test_ratios_are_those_of_the_same_round() -> None:
    from tables import ratio

    assert ratio({0: 2.0, 1: 30.0, 2: 8.0}, {0: 1.0, 1: 10.0}) == 2.5


def test_a_call_that_fails_shows_its_log(tmp_path: Path) -> None:
    from apart.crew import Failed, measure

    with pytest.raises(Failed, match="No module named 'nowhere'"):
        measure("nowhere:at_all", {}, scratch=tmp_path)
