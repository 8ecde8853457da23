"""DeepSpeed's own way into ZeRO stage 3: `zero.Init` under transformers' `from_pretrained`."""

from __future__ import annotations

import logging
from typing import Any

from apart.child import Job, Place, Work

from loaders.digest import DTYPES, of_partitioned
from loaders.sharded import import_model


def parameters(job: Job, place: Place) -> Work:
    """The partitioned parameters alone, without an engine."""
    load = _loading(job, place)

    def work() -> Any:
        return _checked(job, load())

    return work


def engine(job: Job, place: Place) -> Work:
    """The same, and `deepspeed.initialize`, which makes the fp32 masters of them."""
    import torch

    load = _loading(job, place)

    def work() -> Any:
        import deepspeed

        model = load()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        live, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_config(job), dist_init_required=False
        )
        assert live.zero_optimization_stage() == 3
        return _checked(job, live.module)

    return work


def _loading(job: Job, place: Place) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from stages.wrap.zero import compat

    import_model()
    compat.start(place.dist(), logging.getLogger("benchmark"))
    noticed = HfDeepSpeedConfig(_config(job))

    def load() -> Any:
        assert noticed.is_zero3()
        return AutoModelForCausalLM.from_pretrained(job["model"], dtype=DTYPES[job["dtype"]])

    return load


def _config(job: Job) -> dict[str, Any]:
    """What `wrap.zero` gives DeepSpeed."""
    from pipeline.contracts.precision import Precision
    from stages.wrap.zero import Zero
    from stages.wrap.zero.config import generate

    precision = Precision(
        master="fp32", compute=job["dtype"], reduce="fp32", buffer=None, loss_scaling=None
    )
    return generate(Zero(stage=3), precision, max_grad_norm=1.0)


def _checked(job: Job, module: Any) -> Any:
    for name, parameter in module.named_parameters():
        assert hasattr(parameter, "ds_tensor"), f"{name} is not partitioned"
        assert parameter.ds_tensor.dtype == DTYPES[job["dtype"]], f"{name} has another dtype"
    return lambda: {"digest": of_partitioned(module, job["config"])}
