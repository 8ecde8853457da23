"""Any layout of ranks goes on with what any other has saved: tensor, context, pipeline and expert
parallelism, FSDP, DDP and ZeRO, with optimizer state and an average of the weights."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import DTYPES, Reading, open_state
from tests.support.layouts import FROZEN, LAST, LAYOUTS, continued, undisturbed
from tests.support.processes import GROUP_LIMIT, in_turn, run_ranks
from tests.support.tier import FULL

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

CHOSEN = list(LAYOUTS) if FULL else ["zero3", "tensor", "pipeline"]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint."""
    state = open_state(str(folder / "checkpoints" / f"step-{LAST:08d}"), Reading())
    found = {}
    for key, entry in state.tensors.items():
        if not key.startswith("random/"):
            memory = bytearray(entry.nbytes)
            state.read_into(key, 0, memoryview(memory))
            found[key] = torch.frombuffer(memory, dtype=DTYPES[entry.dtype]).view(entry.shape)
    state.close()
    return found


@pytest.mark.full
@pytest.mark.parametrize("change", ["whole", "lora", "frozen"])
def test_any_layout_goes_on_with_any_other(change: str, tmp_path: Path) -> None:
    walk(CHOSEN, change, tmp_path)


def test_frozen_weights_come_from_the_source_again(tmp_path: Path) -> None:
    held = walk(["fsdp", "zero3"], "frozen", tmp_path)
    assert "weight/model.layers.1.mlp.experts.down_proj" in held
    for pattern in FROZEN:
        assert not any(fnmatch(key.partition("/")[2], pattern) for key in held)


def walk(chosen: list[str], change: str, folder: Path) -> set[str]:
    """Go on under each of the `chosen` layouts from the checkpoint of each; return the keys of
    checkpoints."""
    groups: dict[int, list[str]] = {}
    for name in chosen:
        groups.setdefault(LAYOUTS[name].ranks, []).append(name)
    losses, after = dict[str, Any](), dict[str, Any]()
    for ranks, names in groups.items():
        calls = [(undisturbed, str(folder / name), name, change) for name in names]
        losses |= zip(names, run_ranks(in_turn, ranks, calls, limit=GROUP_LIMIT)[0], strict=True)
    whole = {name: saved(folder / name) for name in chosen}
    expected = losses[chosen[0]], whole[chosen[0]]
    assert {key.partition("/")[0] for key in expected[1]} == {
        "weight", "exp_avg", "exp_avg_sq", "ema",
    }  # fmt: skip
    for ranks, names in groups.items():
        calls = [(continued, str(folder), name, chosen, change) for name in names]
        after |= zip(names, run_ranks(in_turn, ranks, calls, limit=GROUP_LIMIT)[0], strict=True)
    pairs = 0
    for name in chosen:
        for source, given in zip(chosen, after[name], strict=True):
            tensors = saved(folder / f"{source} to {name}")
            if source == name:
                assert given == losses[name], name
                assert all(torch.equal(one, whole[name][key]) for key, one in tensors.items()), name
                continue
            pairs += 1
            assert given == pytest.approx(expected[0], rel=1e-5), (source, name)
            assert tensors.keys() == expected[1].keys()
            for key, one in tensors.items():
                torch.testing.assert_close(
                    one, expected[1][key], rtol=0, atol=1e-5, msg=f"{key}: {source} to {name}"
                )
    assert pairs == len(chosen) * (len(chosen) - 1)
    return set(expected[1])
