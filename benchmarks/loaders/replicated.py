"""Other ways to have the whole model on every rank, as DDP needs it."""

from __future__ import annotations

from typing import Any

from apart.child import Job, Place, Work

from loaders.digest import DTYPES, of_module
from loaders.sharded import import_model


def mapped(job: Job, place: Place) -> Work:
    """Every rank calls `from_pretrained`. Weights that keep their dtype are then the pages of the
    files: they are read at first use, and copied by the first update."""
    from transformers import AutoModelForCausalLM

    import_model()

    def work() -> Any:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=DTYPES[job["dtype"]])
        return _checked(job, model)

    return work


def from_pretrained(job: Job, place: Place) -> Work:
    """The same, and weights get memory of their own, as the first update would give them."""
    import torch
    from transformers import AutoModelForCausalLM

    import_model()

    def work() -> Any:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=DTYPES[job["dtype"]])
        with torch.no_grad():
            for parameter in model.parameters() if job["dtype"] == "bf16" else ():
                parameter.set_(parameter.clone())
        return _checked(job, model)

    return work


def rank_0_and_broadcast(job: Job, place: Place) -> Work:
    """Rank 0 loads the model and sends every tensor; the others have only allocated it."""
    import torch
    import torch.distributed
    from shapes import outline
    from transformers import AutoModelForCausalLM

    from stages.wrap.build import materialize

    import_model()
    dtype, device = DTYPES[job["dtype"]], torch.device("cpu")

    def work() -> Any:
        if place.rank == 0:
            model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
        else:
            model = outline(job["config"], dtype)
            materialize(model, device, buffer_device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                torch.distributed.broadcast(parameter, src=0)
        return _checked(job, model)

    return work


def _checked(job: Job, model: Any) -> Any:
    assert {parameter.dtype for parameter in model.parameters()} == {DTYPES[job["dtype"]]}
    return lambda: {"digest": of_module(model, job["config"])}
