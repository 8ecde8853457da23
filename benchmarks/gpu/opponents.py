"""The same training by hand: a plain torch loop, and transformers' Trainer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from gpu.settings import Setting
from gpu.turns import wait

CLIP, LR = 1.0, 1e-5


@dataclass(frozen=True, kw_only=True)
class Work:
    """A setting's model and samples."""

    setting: Setting
    model: Path
    tokens: np.ndarray[Any, Any]
    """Tokens of all samples, one after another."""
    length: int
    device: torch.device
    folder: Path

    def samples(self) -> Iterator[Tensor]:
        """Yield input ids of micro-batches, int64, (samples, length), without end."""
        place, size = 0, self.setting.micro * self.length
        while True:
            if place + size > len(self.tokens):
                place = 0
            part = np.asarray(self.tokens[place : place + size], dtype=np.int64)
            yield torch.from_numpy(part).view(self.setting.micro, self.length)
            place += size

    def module(self) -> nn.Module:
        """Return transformers' module with its weights: fp32 masters, or frozen bf16 weights below
        peft's adapter; blocks compiled where the setting has them so."""
        adapter = self.setting.adapter
        dtype = torch.float32 if adapter is None else torch.bfloat16
        with self.device:
            model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
        model.to(self.device)
        blocks = list(model.model.layers)
        if adapter is not None:
            model = _adapted(model, adapter)
        if self.setting.compiled:
            backend = self.setting.fields["model"]["compile"].get("backend", "inductor")
            for block in blocks:
                block.compile(backend=backend)
        return model.train()


def _adapted(model: nn.Module, adapter: Mapping[str, Any]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=adapter["rank"], lora_alpha=adapter["alpha"],
        target_modules=adapter.get("targets", "all-linear"), task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, config)  # type: ignore[arg-type]


class BareLoop:
    """The loop of every tutorial: autocast, fused AdamW, clipping, accumulation; nothing written,
    the loss read at the end of a block."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._model = work.module()
        self._samples = work.samples()
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=LR, weight_decay=0.01, fused=True)
        self.run(2)

    def run(self, steps: int) -> float:
        """Train; return the last step's mean loss."""
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self._step()
        return loss.item()

    def _step(self) -> Tensor:
        micros = self._work.setting.accumulation
        total = torch.zeros((), device=self._work.device)
        for _ in range(micros):
            ids = next(self._samples)
            if self._work.device.type == "cuda":
                ids = ids.pin_memory()
            ids = ids.to(self._work.device, non_blocking=True)
            with torch.autocast(self._work.device.type, torch.bfloat16):
                logits = self._model(input_ids=ids, use_cache=False).logits
            flat, targets = logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
            loss = F.cross_entropy(flat, targets) / micros
            del logits, flat
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._trained, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, work: Work) -> None:
        self._tokens, self._length = work.tokens, work.length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part = self._tokens[index * self._length : (index + 1) * self._length]
        ids = torch.from_numpy(np.asarray(part, dtype=np.int64))
        return {"input_ids": ids, "labels": ids}


class TrainerLoop:
    """transformers' Trainer in a thread of its own, which stands still between its blocks."""

    def __init__(self, work: Work) -> None:
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._block, self._error, self._loss = 0, None, float("nan")  # type: ignore[var-annotated]
        self._device = work.device
        micro = work.setting.micro
        arguments = TrainingArguments(
            output_dir=str(work.folder / "trainer"), per_device_train_batch_size=micro,
            gradient_accumulation_steps=work.setting.accumulation, max_steps=1_000_000,
            learning_rate=LR, max_grad_norm=CLIP, bf16=True, optim="adamw_torch_fused",
            logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=work.device.type == "cpu",
        )  # fmt: skip
        trainer = Trainer(
            model=work.module(), args=arguments, train_dataset=_Rows(work),  # type: ignore[arg-type]
            callbacks=[_Pause(self)],
        )  # fmt: skip
        self._thread = threading.Thread(target=self._train, args=(trainer,), daemon=True)
        self._thread.start()
        self.run(2)

    def run(self, steps: int) -> float:
        """Have it take `steps` steps; raises what it raised."""
        self._block = steps
        self._go.release()
        self._stands.acquire()
        if self._error is not None:
            raise self._error
        return self._loss

    def _train(self, trainer: Trainer) -> None:
        self._go.acquire()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            trainer.train()
        except BaseException as error:
            self._error = error
            self._stands.release()

    def stepped(self) -> None:
        """Stand still behind the last step of a block."""
        self._block -= 1
        if not self._block:
            wait(self._device)
            self._stands.release()
            self._go.acquire()


class _Pause(TrainerCallback):
    def __init__(self, loop: TrainerLoop) -> None:
        self._loop = loop

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        self._loop.stepped()


OPPONENTS = {"bare": BareLoop, "trainer": TrainerLoop}
