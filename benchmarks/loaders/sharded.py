"""Other ways into torch's `fully_shard` (FSDP2): by hand, by torch, by accelerate.

None may fall back to another strategy in silence, so each result is looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from apart.child import Job, Place, Work

from loaders.digest import DTYPES, of_module


def from_pretrained(job: Job, place: Place) -> Work:
    """Every rank loads the whole model, then shards it."""
    from transformers import AutoModelForCausalLM

    import_model()

    def work() -> Any:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=DTYPES[job["dtype"]])
        return _checked(job, shard(model, place))

    return work


def rank_0_and_broadcast(job: Job, place: Place) -> Work:
    """Rank 0 maps the files and sends every tensor whole: `set_model_state_dict` with
    `broadcast_from_rank0`."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    import_model()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def work() -> Any:
        model = empty(job, place)
        tensors: dict[str, Any] = {}
        if place.rank == 0:
            for file in sorted(Path(job["model"]).glob("*.safetensors")):
                tensors |= load_file(file)
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        set_model_state_dict(model, tensors, options=options)
        return _checked(job, model)

    return work


def checkpoint_reader(job: Job, place: Place) -> Work:
    """torch.distributed.checkpoint's HuggingFaceStorageReader: every rank its own part."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    import_model()

    def work() -> Any:
        model = empty(job, place)
        tensors = dict(model.named_parameters())
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(job["model"]))
        return _checked(job, model)

    return work


def accelerate(job: Job, place: Place) -> Work:
    """accelerate's `cpu_ram_efficient_loading` with FSDP2. On the CPU accelerate runs DDP instead
    without a word, so the branch is forced."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import AutoModelForCausalLM

    import_model()
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for state in (AcceleratorState, PartialState):
        state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    assert accelerator.num_processes == place.world

    def work() -> Any:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=DTYPES[job["dtype"]])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, _ = accelerator.prepare(model, optimizer)
        return _checked(job, model)

    return work


def import_model() -> None:
    """What `from_pretrained` imports only when it is called."""
    import accelerate  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401


def shard(model: Any, place: Place) -> Any:
    """Every block, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (place.world,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def empty(job: Job, place: Place) -> Any:
    """The sharded model with memory for its parts, and nothing in it yet."""
    import torch
    from shapes import outline

    from stages.wrap.build import materialize

    device = torch.device("cpu")
    model = shard(outline(job["config"], DTYPES[job["dtype"]]), place)
    materialize(model, device, buffer_device=device)
    return model


def _checked(job: Job, model: Any) -> Any:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    assert isinstance(model, FSDPModule), f"{type(model).__name__} is not sharded"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        assert parameter.dtype == DTYPES[job["dtype"]], f"{name} is {parameter.dtype}"
        assert not parameter.is_meta, f"{name} is not loaded"
    return lambda: {"digest": of_module(model, job["config"], lambda one: one.full_tensor())}
