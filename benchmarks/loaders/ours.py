"""The project's own way: every rank reads its parts of tensors into the place where they stay."""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apart.child import Job, Place, Work

from loaders.digest import of_module, of_partitioned


def fsdp(job: Job, place: Place) -> Work:
    """`wrap.fsdp`, whole: build, shard, load; the optimizer has no state yet."""
    from torch.distributed.fsdp import FSDPModule

    import stages.wrap.build
    from stages.wrap.fsdp import Fsdp

    imported()
    phases: dict[str, float] = {}

    def work() -> Any:
        ctx, model, precision, plan = declared(job, place, master=job["dtype"])
        with clocked(stages.wrap.build, "load_weights", phases):
            engine = Fsdp().run(ctx, model, precision, plan)
        assert isinstance(engine.model, FSDPModule)
        return lambda: {
            "digest": of_module(engine.model, job["config"], lambda one: one.full_tensor()),
            **phases,
        }

    return work


def zero(job: Job, place: Place) -> Work:
    """`wrap.zero` at stage 3, whole: partitioned parameters, DeepSpeed's engine, the
    fp32 masters loaded, the parameters made of them."""
    import stages.wrap.zero.build
    from stages.wrap.zero import Zero, compat

    imported()
    phases: dict[str, float] = {}
    compat.start(place.dist(), LOG)

    def work() -> Any:
        ctx, model, precision, plan = declared(job, place, master="fp32")
        with clocked(stages.wrap.zero.build, "load_weights", phases):
            engine: Any = Zero(stage=3).run(ctx, model, precision, plan)
        module = engine.deepspeed.module
        assert all(hasattr(parameter, "ds_tensor") for parameter in module.parameters())
        return lambda: {"digest": of_partitioned(module, job["config"]), **phases}

    return work


def ddp(job: Job, place: Place) -> Work:
    """What `wrap.ddp` does before it hands the module to torch, which takes memory for gradients:
    build, and load, each rank reading all."""
    import torch.distributed

    import stages.wrap.build

    imported()
    phases: dict[str, float] = {}

    def work() -> Any:
        ctx, model, precision, _ = declared(job, place, master=job["dtype"])
        with clocked(stages.wrap.build, "load_weights", phases):
            everyone = torch.distributed.group.WORLD
            module = stages.wrap.build.build_module(ctx, model, precision, replicas=everyone)
        return lambda: {"digest": of_module(module, job["config"]), **phases}

    return work


LOG = logging.getLogger("benchmark")


def imported() -> None:
    """All that is imported only when a stage runs."""
    for name in ("transformers.models.qwen2.modeling_qwen2", "accelerate", "stages.model.source"):
        importlib.import_module(name)


def declared(job: Job, place: Place, *, master: str) -> tuple[Any, Any, Any, Any]:
    """Context, model, precision and optimizer, as a run declares them."""
    from pipeline import testing
    from stages.model.hf import HfModel
    from stages.optimizer.adamw import AdamW
    from stages.precision.policy import PrecisionPolicy

    ctx = testing.context(place.folder / "run", seed=1, dist=place.dist())
    ctx.log = LOG
    model = HfModel(path=str(Path(job["model"]).absolute())).run(ctx)
    precision = PrecisionPolicy(compute=job["dtype"], master=master).run(ctx)
    return ctx, model, precision, AdamW(lr=1e-4).run(ctx)


@contextlib.contextmanager
def clocked(module: Any, name: str, phases: dict[str, float]) -> Iterator[None]:
    """Note in `phases` how many seconds a function of `module` takes while the body runs."""
    real = getattr(module, name)

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        found = real(*args)
        phases[name] = time.perf_counter() - began
        return found

    setattr(module, name, timed)
    try:
        yield
    finally:
        setattr(module, name, real)
