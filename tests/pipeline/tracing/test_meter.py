"""What counts as memory, and what torch keeps private about it."""

from __future__ import annotations

import re

import pytest
import torch
from pipeline.tracing.fake_compat import told_apart
from pipeline.tracing.group_compat import silent_group
from pipeline.tracing.meter import REST, Meter
from torch._subclasses import FakeTensorMode

from pipeline.errors import StageError


def test_storages_count_until_they_are_freed() -> None:
    with Meter(fake=False) as meter:
        meter.enter(("work", 0, ""))
        one = torch.zeros(1000)
        view = one[10:]
        assert meter.held == {REST: 4000}
        meter.own("mine", [view])
        torch.zeros(500)
        del one, view
        assert meter.held == {}
        meter.leave()
    peak = meter.moments["work", 0, ""]
    assert (peak.bytes, peak.items) == (6000, {"mine": 4000, REST: 2000})


def test_resized_storages_and_the_meta_device() -> None:
    with Meter(fake=False) as meter:
        one = torch.zeros(1000)
        torch.zeros(10_000, device="meta")
        one.untyped_storage().resize_(0)
        assert meter.now == 0
        one.untyped_storage().resize_(800)
        assert meter.now == 800
    assert "resizing" not in torch.UntypedStorage.resize_.__qualname__


def test_tensors_without_values_count_and_answer() -> None:
    with FakeTensorMode(), Meter(fake=True) as meter:
        one = torch.zeros(1 << 30)
        assert meter.now == 1 << 32
        assert bool((one == 1).all())


def test_gradients_are_added_in_place_as_they_are_unwatched() -> None:
    """And those that are views are not, as they are not unwatched."""
    with Meter(fake=False) as meter:
        x = torch.ones(1000, requires_grad=True)
        h = x * 2
        out = (h * 3 + h * 4 + h * 5).sum()
        start = meter.now
        meter.enter(("backward", 0, ""))
        out.backward()
        meter.leave()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [24.0]
    taken = meter.moments["backward", 0, ""].bytes - start
    assert taken == 4 + 2 * 4000


def test_what_needs_values_is_said() -> None:
    said = "came to aten.nonzero.default, whose result depends"
    with pytest.raises(StageError, match=re.escape(said)), told_apart(), FakeTensorMode():
        torch.zeros(3).nonzero()


def test_a_silent_group_has_any_size() -> None:
    with silent_group(64):
        whole, part = torch.zeros(128), torch.ones(2)
        torch.distributed.all_gather_into_tensor(whole, part)
        assert torch.distributed.get_world_size() == 64
    assert not torch.distributed.is_initialized()
