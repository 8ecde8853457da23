"""Each process of benchmarks/checkpoint.py."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.strategies import STRATEGIES

MODEL = {
    "model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
PAUSE = 1.0
"""Seconds between two saves, in which the system finishes the previous one's writes."""


def result_file(job: dict[str, Any], name: str, rank: int) -> Path:
    """Return the file with a rank's result."""
    return Path(job["folder"]) / f"{name}-{rank}.json"


def main(name: str, rank: int, world: int, job: dict[str, Any]) -> None:
    """Join the group in a file, as ranks of `pipe run` do, measure, write the result."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed

    from pipeline.distributed import environment
    from pipeline.distributed.process_group import DistContext

    torch.set_num_threads(1)
    os.environ |= environment.ON_LOOPBACK
    file = os.open(f"{job['folder']}/store-{name}", os.O_RDWR | os.O_CREAT)
    environment.shared = environment.Shared(heartbeats=-1, failures=-1, stacks=-1, store=file)
    store = torch.distributed.FileStore(f"/proc/self/fd/{file}", world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    dist = DistContext(
        rank=rank, world_size=world, local_rank=rank, local_world_size=world,
        device=torch.device("cpu"), store=torch.distributed.PrefixStore("pipe", store),
    )  # fmt: skip
    measured = {"save_and_load": save_and_load, "load_only": load_only}[name](dist, job)
    result_file(job, name, rank).write_text(json.dumps(measured), "utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def make(dist: Any, job: dict[str, Any]) -> tuple[Any, Any]:
    """Return the context and the engine under measurement, after one training step."""
    from pipeline import testing
    from stages.model.hf import HfModel
    from stages.optimizer.adamw import AdamW
    from stages.precision.policy import PrecisionPolicy

    run_dir = Path(job["folder"]) / "run"
    run_dir.mkdir(exist_ok=True)
    ctx = testing.context(run_dir, seed=1, dist=dist)
    ctx.log = logging.getLogger("benchmark")
    width = job["width"]
    config = {**MODEL, "hidden_size": width, "intermediate_size": 4 * width}
    source = HfModel(config=config, init="random").run(ctx)
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    wrap = STRATEGIES[job["wrap"]].full_size().stage()
    engine = wrap.run(ctx, source, precision, AdamW(lr=1e-4).run(ctx))
    take_step(engine, dist, job["tokens"])
    return ctx, engine


def take_step(engine: Any, dist: Any, count: int) -> float:
    """Take a training step of `count` tokens a rank; return its seconds on this rank."""
    import torch

    from pipeline import MicroBatch
    from stages.objectives.cross_entropy import CrossEntropy

    generator = torch.Generator().manual_seed(dist.rank)
    tokens = torch.randint(0, 32000, (1, count), generator=generator)
    batch = MicroBatch(tokens={"input_ids": tokens, "labels": tokens})
    dist.barrier()
    began = time.perf_counter()
    engine.accumulate([batch], CrossEntropy(), counts={"targets": count * dist.world_size})
    engine.step(lr_scales=[1.0])
    return time.perf_counter() - began


def with_deepspeed(job: dict[str, Any]) -> bool:
    """Return whether DeepSpeed's engine is measured."""
    return STRATEGIES[job["wrap"]].use == "wrap.zero"


def checkpoints(ctx: Any, engine: Any) -> Any:
    from stages.checkpoint.sharded import ShardedCheckpoint

    return ShardedCheckpoint(keep=1).run(ctx, engine)


def save_and_load(dist: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return what saves cost and the bytes that loading reads, with the rival's beside them."""
    ctx, engine = make(dist, job)
    kept = checkpoints(ctx, engine)
    kept.poll()  # as after every step, so that the writer starts
    size = kept.staging.size
    copies = Copies(size)
    rounds = [save_beside_steps(dist, job, engine, kept, copies, n) for n in range(job["saves"])]
    grown = growth()
    crowded = save_twice(kept, job["saves"])
    beyond = grown() + memory_of_children()
    kept.close()
    rival = own_format if with_deepspeed(job) else dcp
    return {
        "rounds": rounds,
        "crowded": crowded,
        "written": size,
        "beyond": beyond,
        **loaded(ctx, engine),
        **rival(dist, engine, Path(job["folder"]) / "rival"),
    }


def save_beside_steps(
    dist: Any, job: dict[str, Any], engine: Any, kept: Any, copies: Copies, number: int
) -> dict[str, Any]:
    """Take two steps alone, copy, save, and take one beside the writers; return the seconds of all,
    and on rank 0 what the writers cost."""
    from pipeline.contracts.training import Progress

    time.sleep(PAUSE)
    alone = [take_step(engine, dist, job["tokens"]) for _ in range(2)]
    copied = copies.seconds(dist)
    dist.barrier()
    began = time.perf_counter()
    kept.save(Progress(step=2 * number + 1))
    stall = time.perf_counter() - began
    behind = take_step(engine, dist, job["tokens"])
    kept.finish()
    return {
        "copies": copied,
        "stall": stall,
        "alone": alone,
        "behind": behind,
        "cost": [vars(one) for one in kept.poll()],
    }


def save_twice(kept: Any, number: int) -> float:
    """Save, and save again at once, before the first is on disk; return the second's stall."""
    from pipeline.contracts.training import Progress

    kept.save(Progress(step=2 * number + 1))
    began = time.perf_counter()
    kept.save(Progress(step=2 * number + 2))
    stall = time.perf_counter() - began
    kept.finish()
    return stall


def load_only(dist: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes that loading reads on another number of processes."""
    ctx, engine = make(dist, job)
    found = loaded(ctx, engine)
    if not with_deepspeed(job):
        import torch.distributed.checkpoint as library

        state = dcp_state(engine)
        rival = Path(job["folder"]) / "rival"
        found |= rival_read(lambda: library.load(state, checkpoint_id=rival))
    return found


class Copies:
    """Copies of `size` bytes into memory that has been written before, each as somebody would write
    it by hand."""

    def __init__(self, size: int) -> None:
        import torch

        source = torch.ones(size, dtype=torch.uint8)
        target = torch.zeros(size, dtype=torch.uint8)
        from_array, to_array = source.numpy(), target.numpy()
        self._ways: dict[str, Callable[[], object]] = {
            "torch": lambda: target.copy_(source),
            "numpy": lambda: to_array.__setitem__(slice(None), from_array),
            "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size),
        }

    def seconds(self, dist: Any) -> dict[str, float]:
        """Time one copy each way, which all ranks make at once, in seconds."""
        return {name: self._time(dist, way) for name, way in self._ways.items()}

    def _time(self, dist: Any, way: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        way()
        return time.perf_counter() - began


def loaded(ctx: Any, engine: Any) -> dict[str, Any]:
    """Restore; return the bytes read and the bytes that this rank holds."""
    from pipeline.checkpoint.location import open_store
    from pipeline.checkpoint.restore import Restoration

    restoration = Restoration(ctx, engine, open_store(str(ctx.run_dir / "checkpoints")))
    grown = growth()
    restoration.newest(lambda progress: None)
    memory = grown()
    own = sum(
        tensor.numel() * tensor.itemsize
        for part in engine.fragments()
        for tensor in part.state.values()
    )
    return {"read": restoration.bytes_read, "own": own, "load_memory": memory}


def rival_read(call: Callable[[], object]) -> dict[str, int]:
    """Return the bytes that this process requests from the system while `call` runs, and the peak
    growth of its memory."""
    before, grown = _read_calls(), growth()
    call()
    return {"rival_read": _read_calls() - before, "rival_load_memory": grown()}


def growth() -> Callable[[], int]:
    """Return a function that gives the peak growth of this process's resident memory since now, in
    bytes, shared memory included."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # resets the peak: proc(5)
    before = _status("self", "VmRSS")
    return lambda: _status("self", "VmHWM") - before


def memory_of_children() -> int:
    """Return the bytes of memory that the processes started by this one do not share."""
    tasks = Path("/proc/self/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text("ascii").split()]
    return sum(_status(pid, "RssAnon") for pid in children)


def _status(process: str, name: str) -> int:
    lines = Path("/proc", process, "status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def _read_calls() -> int:
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def dcp_state(engine: Any) -> dict[str, Any]:
    """Return the state to save with torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(engine.parts[0], options=options),
        "optimizer": get_optimizer_state_dict(
            engine.parts[0], engine.optimizers[0].optimizer, options=options
        ),
    }


def dcp(dist: Any, engine: Any, folder: Path) -> dict[str, Any]:
    """Time torch.distributed.checkpoint: its synchronous save, and how long its asynchronous one
    blocks."""
    import torch.distributed.checkpoint as library

    def fresh() -> None:
        dist.barrier()
        if dist.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()

    sync, blocked, done = [], [], []
    for _ in range(3):
        fresh()
        began = time.perf_counter()
        library.save(dcp_state(engine), checkpoint_id=folder)
        sync.append(time.perf_counter() - began)
    for _ in range(3):
        fresh()
        began = time.perf_counter()
        future = library.async_save(dcp_state(engine), checkpoint_id=folder)
        blocked.append(time.perf_counter() - began)
        future.result()
        done.append(time.perf_counter() - began)
    state = dcp_state(engine)
    return {
        "rival": "torch.distributed.checkpoint",
        "rival_times": {
            "save": statistics.median(sync),
            "async_save, blocks, first": blocked[0],
            "async_save, blocks, later": statistics.median(blocked[1:]),
            "async_save, done": statistics.median(done),
        },
        **rival_read(lambda: library.load(state, checkpoint_id=folder)),
    }


def own_format(dist: Any, engine: Any, folder: Path) -> dict[str, Any]:
    """Time DeepSpeed's save_checkpoint and load_checkpoint."""
    saves = []
    for turn in range(3):
        dist.barrier()
        began = time.perf_counter()
        engine.deepspeed.save_checkpoint(str(folder / str(turn)))
        dist.barrier()
        saves.append(time.perf_counter() - began)
    return {
        "rival": "DeepSpeed save_checkpoint",
        "rival_times": {"save_checkpoint, blocks": statistics.median(saves)},
        **rival_read(lambda: engine.deepspeed.load_checkpoint(str(folder / "2"))),
    }
