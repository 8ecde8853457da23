"""The blocks of a stage of a pipeline, and the arguments that it passes to the model."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import StageError
from pipeline.planning.trace.torch_compat import silent_group
from stages.wrap.pipeline.schedule import Pipeline, PipelinePlan, Stage
from stages.wrap.pipeline.split import keep_layers, layer_list, layer_ranges
from stages.wrap.torch_engine import total_norm
from tests.support.batches import micro_batch
from tests.support.processes import run_ranks


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


TINY = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "falcon", "bloom", "gpt2"])
def test_what_stands_for_other_stages_returns_what_they_would(kind: str) -> None:
    """A block of Falcon and Bloom returns a tuple; GPT-2 looks positions up on each stage."""
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY)).eval()
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    keep_layers(first, range(1))
    keep_layers(last, range(1, 2))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    parts = [
        Stage(one, first=one is first, last=False, dtype=torch.float32, beat=lambda: None)
        for one in (first, last)
    ]
    batch = micro_batch(ids, ids)
    for part in parts:
        part.batches = [(batch, batch)]
    with torch.no_grad():
        expected = whole.base_model(ids, use_cache=False).last_hidden_state
        hidden = parts[1]._forward(parts[0]._forward(ids))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)


def test_the_head_counts_as_the_blocks_that_it_takes_as_long_as() -> None:
    def sizes(*args: Any) -> list[int]:
        return [len(one) for one in layer_ranges(*args)]

    assert sizes(32, 4, 128256 * 4096, 218_112_000) == [8, 9, 9, 6]  # Llama-3.1-8B
    assert sizes(126, 16, 66, 100) == [7, *14 * [8], 7]
    assert sizes(5, 2, 2, 5) == [3, 2]
    assert sizes(4, 4, 9, 1) == [1, 1, 1, 1]
    assert sizes(7, 3) == [2, 3, 2]
    assert [range(2), range(2, 3)] == layer_ranges(3, 2, 1, 2)


def test_a_model_without_one_list_of_blocks_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **TINY))
    with pytest.raises(StageError, match="a opt has no one list of blocks"):
        layer_list(model)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_a_schedule_that_is_dropped_takes_its_buffers_with_it(schedule: str) -> None:
    """Without the garbage collector, as steps of other shapes come one after another."""
    with silent_group(2):
        plan = PipelinePlan(
            schedule=schedule, group=torch.distributed.group.WORLD,
            stages_per_rank=1 if schedule == "1F1B" else 2, width=4, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        made = [
            Stage(Recorder(), first=n == 0, last=False, dtype=torch.float32, beat=lambda: None)
            for n in plan.own()
        ]
        pipeline = Pipeline(plan, made)
        first = pipeline._schedule(2, 1, 4)
        before = weakref.ref(first._stage if schedule == "1F1B" else first._stages[0])
        del first
        gc.disable()
        try:
            pipeline._schedule(4, 1, 4)
            assert before() is None
        finally:
            gc.enable()


def norms(dist: Any) -> float:
    own: list[Tensor] = [torch.tensor([3.0, 4.0])] if dist.rank else []
    return float(total_norm(own, divided=True))


def test_a_rank_without_gradients_takes_part_in_the_norm() -> None:
    assert run_ranks(norms, 2) == [5.0, 5.0]
