"""Schedules of a pipeline, and the arguments that a stage passes to the model."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.distributed.process_group import DistContext
from pipeline.planning.trace.torch_compat import silent_group
from stages.wrap.axes import Axes, PipelineParallel
from stages.wrap.pipeline_compat import PipelinePasses, Stage
from tests.support.batches import micro_batch


class Recorder(nn.Module):
    """A base model that keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="flash_attention_2")
        self.seen: dict[str, Any] = {}

    @property
    def base_model(self) -> nn.Module:
        return self

    def __call__(self, **given: Any) -> Any:
        self.seen = given
        return SimpleNamespace(last_hidden_state=torch.zeros(2, 4, 3))


def test_flash_attention_is_told_of_documents_on_every_stage() -> None:
    """By itself it takes two packed samples for unpacked ones."""
    model: Any = Recorder()
    beats: list[int] = []
    stage = Stage(model, first=True, last=False, dtype=torch.float32, beat=lambda: beats.append(1))
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    ids = torch.ones(2, 4, dtype=torch.int64)
    batch = micro_batch(ids, ids, positions=positions)
    stage.batches = [(batch, batch)]
    model.forward(ids)
    assert model.seen["cu_seq_lens_q"].tolist() == [0, 2, 4, 7, 8]
    assert model.seen["position_ids"] is positions
    assert beats == [1]


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_a_schedule_that_is_dropped_takes_its_buffers_with_it(schedule: str) -> None:
    """Without the garbage collector, as steps of other shapes come one after another."""
    with silent_group(2):
        stages = {
            n: Stage(Recorder(), first=n == 0, last=False, dtype=torch.float32, beat=lambda: None)
            for n in ([0] if schedule == "1F1B" else [0, 2])
        }
        asked: Any = PipelineParallel(size=2, schedule=schedule)
        dist = DistContext(world_size=2, device=torch.device("cpu"))
        group = torch.distributed.group.WORLD
        pipeline = PipelinePasses(asked, group, stages, 4, dist, Axes(pipeline=2))
        first = pipeline._schedule(2, 1, 4)
        before = weakref.ref(first._stage if schedule == "1F1B" else first._stages[0])
        del first
        gc.disable()
        try:
            pipeline._schedule(4, 1, 4)
            assert before() is None
        finally:
            gc.enable()
