"""Imports for all test processes, made once in the server that they are forked from.

Otherwise a rank of a ZeRO engine takes three seconds: DeepSpeed imports torch's compiler, asks a C
compiler which operators it could build, and checks whether they are built.
"""

from __future__ import annotations

import gc
import importlib
import os
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"

OPERATORS = ("ShareMemCommBuilder", "CPUAdamBuilder", "PinMemoryBuilder",
             "AsyncIOBuilder")  # fmt: skip
MODULES = (
    "accelerate",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "pipeline.checkpoint.manager",
    "pipeline.checkpoint.store",
    "pipeline.execution.worker",
    "stages.adapter.lora",
    "stages.consolidate.stream",
    "stages.export.safetensors",
    "stages.formats.formats",
    "stages.hf.checkpoint",
    "stages.model.source",
    "stages.train.loop",
    "stages.wrap.ddp_engine",
    "stages.wrap.fsdp_engine",
    "stages.wrap.zero.engine",
    "tests.support.state",
    "tokenizers.trainers",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.flop_counter",
    "torch.profiler._cupti_monitor",
    "transformers.generation.utils",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "transformers.models.gemma.tokenization_gemma",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3_5.tokenization_qwen3_5",
    "transformers.models.t5.tokenization_t5",
)


def load_operators() -> None:
    """Load DeepSpeed's operators, compiling them first if necessary."""
    import torch

    from pipeline.distributed.process_group import DistContext
    from stages.wrap.zero.compat import point_at_device

    point_at_device(DistContext(device=torch.device("cpu")))
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    for name in OPERATORS:
        builder = get_accelerator().create_op_builder(name)
        if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME):
            builder.load(verbose=False)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    load_operators()
    del os.environ["LOCAL_RANK"]  # DeepSpeed sets it; a run would take it for a launcher's
    for module in MODULES:
        importlib.import_module(module)
gc.freeze()  # imported objects stay, and each collection in a run would take a second longer
