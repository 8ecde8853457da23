"""One rank of a training as a script would have it, up to its first step.

    python script.py STRATEGY FOLDER

FOLDER has `config.json` and `tokens.bin` (little-endian uint32), and gets an empty file `stepped`.
The launcher's environment says rank and world. This imports nothing of the project.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

LR, CLIP, SEED = 3e-4, 1.0, 7
LENGTH, BATCH = 128, 4


def main(strategy: str, folder: Path) -> None:
    """Train one step; rank 0 marks its end. Then wait to be killed, with the processor time used so
    far."""
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).train()
    tokens = batch(folder)
    step = WRAPS[strategy](model)
    loss = step(tokens)
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        (folder / "stepped").touch()
    signal.pause()


def batch(folder: Path) -> Tensor:
    """Return this rank's token ids, int64, (BATCH, LENGTH)."""
    tokens = np.memmap(folder / "tokens.bin", dtype="<u4", mode="r")
    start = dist.get_rank() * BATCH * LENGTH
    mine = tokens[start : start + BATCH * LENGTH].astype(np.int64)
    return torch.from_numpy(mine).view(BATCH, LENGTH)


def ddp(model: nn.Module) -> Any:
    """Return a step of DistributedDataParallel."""
    return plain(nn.parallel.DistributedDataParallel(model))


def fsdp(model: nn.Module) -> Any:
    """Return a step of `fully_shard`, each block and then the root."""
    from torch.distributed.fsdp import fully_shard

    for block in model.get_submodule("model.layers").children():
        fully_shard(block)
    fully_shard(model)
    return plain(model)


def plain(model: nn.Module) -> Any:
    """Return the step of every tutorial."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def zero(model: nn.Module, stage: int) -> Any:
    """Return a step of DeepSpeed."""
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        dist_init_required=False,
    )

    def step(tokens: Tensor) -> Tensor:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


WRAPS = {
    "ddp": ddp,
    "fsdp": fsdp,
    "zero2": lambda model: zero(model, 2),
    "zero3": lambda model: zero(model, 3),
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
