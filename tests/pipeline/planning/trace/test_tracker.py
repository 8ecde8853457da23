"""Tensors that count as memory, and torch's private details about them."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pipeline.errors import StageError
from pipeline.planning.trace.run import model_errors_as_ours
from pipeline.planning.trace.torch_compat import silent_group, traced_backend
from pipeline.planning.trace.tracker import Level, MemoryTracker, offloading


def levels(tracker: MemoryTracker) -> list[int]:
    return [level.device for level in tracker.stretches[-1].levels]


def test_storages_count_until_they_are_freed() -> None:
    with MemoryTracker(fake=False) as tracker:
        tracker.enter("work")
        one = torch.zeros(1000)
        view = one[10:]
        torch.zeros(500)
        del one
        assert levels(tracker) == [0, 4000, 6000, 4000]
        del view
    assert levels(tracker)[-1] == 0
    assert tracker.stretches[-1].work["made"] == 6000


def test_tensors_without_values_count_and_answer() -> None:
    with FakeTensorMode(), MemoryTracker(fake=True) as tracker:
        one = torch.zeros(1 << 30)
        assert levels(tracker)[-1] == 1 << 32
        assert bool((one == 1).all())


def test_gradients_are_added_in_place_as_they_are_unwatched() -> None:
    """Gradients that are views are not added in place, just as in an unwatched run."""
    with MemoryTracker(fake=False) as tracker:
        x = torch.ones(1000, requires_grad=True)
        h = x * 2
        out = (h * 3 + h * 4 + h * 5).sum()
        tracker.enter("backward")
        out.backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [24.0]
    assert max(levels(tracker)) - levels(tracker)[0] == 4 + 2 * 4000


def test_gradients_of_distributed_tensors_are_added_as_they_are_unwatched() -> None:
    """The sum of two DTensors is a third, as in an unwatched run."""
    with silent_group(2), MemoryTracker(fake=False) as tracker:
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(1000), mesh, [Shard(0)]).requires_grad_()
        out = (x.to_local() * 3 + x.to_local() * 4).sum()
        tracker.enter("backward")
        out.backward()
    assert max(levels(tracker)) - levels(tracker)[0] == 4 + 3 * 4000


@pytest.mark.parametrize(("device", "host"), [("cuda", 4000), ("cpu", 0)])
def test_what_checkpointing_offloads_is_the_hosts(device: str, host: int) -> None:
    with MemoryTracker(fake=False) as tracker, offloading(tracker, device):
        x = torch.ones(1000, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            y = (x * 2).exp()
        assert tracker.stretches[-1].levels[-1].host == host
        y.sum().backward()
        del y
    assert tracker.stretches[-1].levels[-1] == Level(2 * 4000, 0)  # x and its gradient


def test_what_is_computed_again_counts_as_such() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    with MemoryTracker(fake=False) as tracker:
        out = torch.utils.checkpoint.checkpoint(lambda x: (x @ weight).relu(), torch.ones(4, 8),
                                                use_reentrant=False)  # fmt: skip
        tracker.enter("backward")
        out.sum().backward()
    forward, backward = tracker.stretches
    product = 2 * 4 * 8 * 8
    assert (forward.work["products"], forward.work["again"], forward.repeats) == (product, 0, False)
    assert (backward.work["products"], backward.work["again"], backward.repeats) == (
        product,
        product,
        True,
    )


def test_what_needs_values_is_said() -> None:
    said = "cannot be run on tensors without values: aten.nonzero.default (if it trains"
    with pytest.raises(StageError, match=re.escape(said)), model_errors_as_ours(), FakeTensorMode():
        torch.zeros(3).nonzero()


def test_a_silent_group_has_any_size() -> None:
    with silent_group(64):
        whole, part = torch.zeros(128), torch.ones(2)
        torch.distributed.all_gather_into_tensor(whole, part)
        assert torch.distributed.get_world_size() == 64
    assert not torch.distributed.is_initialized()


def compiled_work(*, fused: bool) -> MemoryTracker:
    """Track a product between operations that inductor would fuse, forward and backward."""

    def part(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        before = torch.sigmoid(torch.tanh(x))
        return torch.cos(before @ weight) * 3

    if fused:
        part = torch.compile(part, backend=traced_backend(), dynamic=False)
    with FakeTensorMode(), MemoryTracker(fake=True) as tracker:
        x, weight = (torch.zeros(1000, 1000, requires_grad=True) for _ in range(2))
        tracker.enter("forward")
        out = part(x, weight)
        tracker.enter("backward")
        out.sum().backward()
    return tracker


def test_fused_kernels_write_what_products_read_and_what_is_left() -> None:
    size = 4_000_000
    plain, fused = (compiled_work(fused=one) for one in (False, True))
    # tanh, sigmoid, product, cos, * 3
    assert plain.stretches[1].work["made"] == 5 * size
    # The product's factor, the product, which is kept for backward, and the output.
    assert fused.stretches[1].work["made"] == 3 * size
    assert fused.stretches[1].work["products"] == plain.stretches[1].work["products"] == 2e9
    # Partitioned as inductor does it: tanh is computed again, not kept.
    assert levels_of(plain) - levels_of(fused) == size
    assert fused.stretches[2].work["products"] == plain.stretches[2].work["products"] == 4e9
    assert fused.stretches[2].work["made"] < plain.stretches[2].work["made"]


def levels_of(tracker: MemoryTracker) -> int:
    """Bytes at the end of forward."""
    return tracker.stretches[1].levels[-1].device
