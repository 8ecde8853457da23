"""Each rank of a memory measurement: the real engine, with every allocation recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from memories.cases import Case
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import testing
from pipeline.chain.plan import Plan
from pipeline.contracts.data import MicroBatch
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext, environment_dist
from stages.objectives.cross_entropy import CrossEntropy
from stages.wrap import torch_compat

SPOKEN = "output-"
"""Beginning of the name of a rank's output file, before the rank's number."""
LET_GO = 1e-4
"""Seconds between two checks whether gloo has released a tensor."""
RELEASE = 0.1
"""Seconds in which gloo releases a bucket, on a busy machine too."""
TOKENS = 2
"""Tokens of a micro-batch, so few that activations are next to nothing compared to the weights."""
STEPS = 3
"""Steps of a run. The first two differ from later ones: moments are made, modules are traced."""


class Meter:
    """Sums of allocator events between named marks."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Meter:
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)

    def phases(self) -> dict[str, dict[str, int]]:
        """Return the bytes held at the end of each mark, and the peak within it."""
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        changes, spans = [], []
        for event in results.events():
            if event.name() == "[memory]":
                changes.append((event.start_ns(), event.nbytes()))
            elif event.name().startswith(MARK):
                end = event.start_ns() + event.duration_ns()
                spans.append((event.name().removeprefix(MARK), event.start_ns(), end))
        changes.sort(key=lambda change: change[0])
        return {name: _within(changes, start, end) for name, start, end in spans}


MARK = "phase:"


def phase(name: str) -> contextlib.AbstractContextManager[Any]:
    """Mark a part of the run."""
    return record_function(MARK + name)


def _within(changes: list[tuple[int, int]], start: int, end: int) -> dict[str, int]:
    held = most = 0
    for at, change in changes:
        if at > end:
            break
        if at > start:
            most = max(most, held, held + change)
        held += change
    return {"peak": max(most, held), "end": held}


def in_place() -> None:
    """Let collectives need no memory, as NCCL's do not. gloo gathers and scatters through copies,
    and one of its threads may be the last to release a tensor: memory freed outside this thread is
    not recorded."""
    distributed: Any = torch.distributed
    distributed.all_reduce = _settled(distributed.all_reduce)
    distributed.broadcast = _settled(distributed.broadcast)
    # The second names are torch 2.13's.
    distributed.all_gather_into_tensor = distributed.all_gather_single = _all_gather
    distributed.reduce_scatter_tensor = distributed.reduce_scatter_single = _reduce_scatter
    # DDP reduces in C++, where nothing shows when gloo has released its first buckets.
    reduce_zeros = torch_compat._reduce_zeros
    torch_compat._reduce_zeros = lambda model: (reduce_zeros(model), time.sleep(RELEASE))[0]


def _settled(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        held = _holders(tensor)
        collective(tensor, *args, **kwargs)
        while _holders(tensor) > held:  # freed by a thread of gloo
            time.sleep(LET_GO)
        return _Done() if async_op else None

    return call


def _holders(tensor: Tensor) -> int:
    """Number of references to a tensor. A thread that holds one in C++ also holds one to the Python
    object, which it gives up a little later."""
    return tensor._use_count() + sys.getrefcount(tensor)


class _Done:
    def wait(self) -> None: ...


def _all_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    parts = output_tensor.view(-1).chunk(torch.distributed.get_world_size(group))
    parts[torch.distributed.get_rank(group)].copy_(input_tensor.view(-1))
    ranks = torch.distributed.get_process_group_ranks(group)
    for rank, part in zip(ranks, parts, strict=True):
        torch.distributed.broadcast(part, src=rank, group=group)
    return _Done() if async_op else None


def _reduce_scatter(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    torch.distributed.all_reduce(input, group=group)
    parts = input.view(-1).chunk(torch.distributed.get_world_size(group))
    output.copy_(parts[torch.distributed.get_rank(group)].view_as(output))
    return _Done() if async_op else None


def main(case: Case, rank: int, world: int, folder: str) -> None:
    """Join the group, measure, write the result into the folder."""
    with Path(folder, f"{SPOKEN}{rank}").open("wb") as file:  # libraries print a lot
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    store = torch.distributed.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist = environment_dist(store, device="cpu")
    _allow_fp16()
    result = measured(dist, folder, case)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(result), "utf-8")
    dist.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # library threads may abort a finished process


def _allow_fp16() -> None:
    # DeepSpeed refuses fp16 on CPUs without fp16 arithmetic; torch computes it on all of them.
    from stages.wrap.zero.compat import point_at_device

    point_at_device(DistContext(device=torch.device("cpu")))
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def measured(dist: DistContext, folder: str, case: Case) -> dict[str, dict[str, int]]:
    """Return the bytes that this rank held at the end of each phase, and the peak within it."""
    in_place()
    stored = store(dist, Path(folder), case)
    plan = case.plan(Path(folder, f"of-{dist.rank}"), device="cpu", model={"path": str(stored)})
    meter = Meter()
    # oneDNN's products in bf16 take buffers that a GPU does not, on CPUs with AMX
    with meter, torch.backends.mkldnn.flags(enabled=False):
        train(testing.context(folder, dist=dist), case, plan)
    return meter.phases()


def store(dist: DistContext, folder: Path, case: Case) -> Path:
    """Write the case's random model: loading it needs next to no memory, unlike making it."""
    made = folder / "model"
    if dist.is_main:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.model["config"]))
        # The dtype is the one it is loaded in: a cast takes a buffer of 4 MiB, more than everything
        # here.
        low = (case.adapter is not None and case.compute != "fp32") or case.master == "bf16"
        model.to(torch.bfloat16 if low else torch.float32).save_pretrained(made)
    dist.barrier()
    return made


def train(ctx: Context, case: Case, plan: Plan) -> None:
    """Load and train for some steps, each phase marked; everything is freed at the end."""
    made: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        ctx.on_exit = stack.callback  # type: ignore[misc]
        for step in plan.slots:
            if step.slot in ("data", "checkpoint", "train"):
                continue
            inputs = {name: slot and made[slot] for name, slot in step.inputs.items()}
            here = dataclasses.replace(ctx, slot=step.slot)
            with phase("load") if step.slot == "wrap" else contextlib.nullcontext():
                made[step.slot] = step.stage.run(here, **inputs)
        engine = made.pop("wrap")
        tokens = torch.arange(TOKENS).view(1, -1) + 1
        batch = MicroBatch(tokens={"input_ids": tokens, "labels": tokens})
        for number in range(STEPS):
            mark_passes(engine.passes, f"{number}")
            counts = {"targets": 1.0}
            engine.accumulate([batch] * case.accumulation, CrossEntropy(), counts=counts)
            with phase(f"{number}/step"):
                engine.step(lr_scales=[1.0])


def mark_passes(passes: Any, name: str) -> None:
    """Mark forward and backward of each micro-batch of the next step."""
    plain, turns = type(passes).train, itertools.count()

    def train(batches: Any, sums: Any, around: Any, backward: Any) -> Any:
        judge, turn = sums.judge, [0]

        def forward(*given: Any) -> Tensor:
            turn[0] = next(turns)
            with phase(f"{name}/{turn[0]}/forward"):
                return judge(*given)

        def back(loss: Tensor) -> None:
            with phase(f"{name}/{turn[0]}/backward"):
                backward(loss)

        sums.judge = forward
        return plain(passes, batches, sums, around, back)

    passes.train = train
