"""The recipe that the facts make: what each slot holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from pipeline.importing import Request
from pipeline.utils import COMMIT
from stages.importing.engines import STAGE_3
from stages.importing.parallelism import parallelism
from stages.importing.report import Draft, Report
from stages.importing.sources import NO_COMMIT, is_local
from stages.importing.trackers import ASKED, DISABLED, TRACKERS
from stages.importing.training import optimizer, put_period, train

Fill: TypeAlias = Callable[[Draft, Request], None]


def compose(draft: Draft, request: Request, name: str, data: Fill) -> Draft:
    """Make the recipe of the facts that were read. Its name is `name` unless they give one, and
    `data` fills the slot of that name."""
    named = "name" if draft.given("name") else "output_name"
    draft.put("name", draft.value(named, name), named)
    _model(draft, request)
    _adapter(draft)
    _precision(draft)
    data(draft, request)
    optimizer(draft)
    _wrap(draft, request)
    draft.slot("checkpoint", "checkpoint.sharded")
    put_period(draft, "save", "checkpoint.every")
    _trackers(draft)
    train(draft, request)
    draft.slot("consolidate", "consolidate.stream")
    draft.slot("export", "export.safetensors")
    draft.copy_all()
    return draft


def _model(draft: Draft, request: Request) -> None:
    draft.slot("model", "model.hf")
    name, revision = draft.value("model"), draft.value("revision")
    if request.model is not None:
        draft.ignore("model", "revision", why="--model replaces it")
        name, _, revision = request.model.partition("@")
    if name is None:
        draft.lacks("model.path", "a folder (./model), a GGUF file or a hub id")
    elif is_local(name) or name.endswith(".gguf"):
        draft.put("model.path", str(Path(name).expanduser().absolute()), "model")
    else:
        floats = not COMMIT.fullmatch(revision or "")
        draft.put("model.path", name, "model", note=NO_COMMIT if floats else "")
        if revision:
            draft.put("model.revision", revision, "revision")


def _adapter(draft: Draft) -> None:
    if draft.value("adapter"):
        draft.slot("adapter", "adapter.lora", "adapter")
        for name, value in (("rank", 16), ("alpha", 32.0), ("dropout", 0.05)):
            draft.default(f"adapter.{name}", value, "TRL's default")
        if not draft.known("adapter.targets"):
            what = "ends of layers' names, or all-linear; peft chose by the architecture"
            draft.lacks("adapter.targets", what)
        if draft.value("quantize"):
            kind = draft.value("quantization", "nf4")
            draft.put("adapter.quantize", kind, "quantize", "quantization")
        return
    if not draft.known("adapter"):
        why, hint = "means LoRA, or nothing without use_peft", "set use_peft to true or false"
        draft.refuse(*draft.facts("adapter."), why=why, hint=hint, blocks=True)
    why = "weights that are trained are not held in 4 bits"
    draft.refuse("quantize", why=why, hint="train an adapter")


def _precision(draft: Draft) -> None:
    draft.slot("precision", "precision.policy")
    draft.default("precision.compute", "fp32", "no mixed precision is asked for")
    if draft.value("precision.compute") != "fp32":
        draft.ignore("precision.tf32", why="no product is in fp32")
    if draft.value("precision.compute") != "fp16":
        draft.ignore("precision.initial_loss_scale", "precision.loss_scale_growth_interval")


def _wrap(draft: Draft, request: Request) -> None:
    use = _strategy(draft)
    draft.slot("wrap", use, "distributed", "strategy")
    policy, classes = draft.value("policy"), draft.value("classes")
    if use == "wrap.zero":
        _zero(draft)
    elif use == "wrap.fsdp" and (policy == "block" or (classes and policy is None)):
        draft.put("wrap.units", classes or "block", "classes", "policy")
    parallelism(draft, use, request)


def _strategy(report: Report) -> str:
    asked, stage = report.value("distributed") or report.value("strategy"), "zero.stage"
    if report.given(stage) and asked in (None, "wrap.zero"):
        return "wrap.zero" if report.value(stage) else "wrap.ddp"
    if report.value(stage):
        why = f"contradicts {asked}, which another file asks for"
        report.refuse(stage, why=why, blocks=True)
    return "wrap.ddp" if asked in (None, "one") else str(asked)


def _zero(report: Report) -> None:
    """Leave out what `pipe check` would refuse, as it has no effect."""
    report.default("zero.stage", 2, "accelerate's default")
    stage = report.value("zero.stage")
    if stage == 3:
        report.ignore("zero.allgather_bucket_size", "zero.round_robin_gradients")
    else:
        report.ignore(*(f"zero.{name}" for name in STAGE_3), *report.facts("zero.offload_param."))
        report.ignore(*report.facts("zero.plus_plus."))
    if stage == 1:
        report.ignore("zero.overlap_comm")
    for block in ("zero.offload_optimizer", "zero.offload_param"):
        device = report.value(f"{block}.device", "none")
        if device != "nvme":
            report.ignore(*(report.facts(f"{block}.") if device == "none" else [f"{block}.path"]))


def _trackers(draft: Draft) -> None:
    """Add a slot for each tracker: `track`, or `track_wandb` and the like if there are several."""
    asked = {*draft.value(ASKED, [])}
    if draft.value("wandb.mode") == DISABLED:
        draft.ignore(*draft.facts("wandb."), why="wandb_mode is disabled")
        asked.discard("wandb")
    used = [name for name in TRACKERS if name in asked or draft.value(f"{name}.use")]
    for name in used:
        slot, use = "track" if len(used) == 1 else f"track_{name}", f"{name}.use"
        draft.slot(slot, f"track.{name}", use, *([ASKED] if name in asked else []))
        for fact in draft.facts(f"{name}."):
            if fact != use:
                draft.copy(fact, f"{slot}.{fact.removeprefix(f'{name}.')}")
        runs = draft.of("name")  # as the file has it; a recipe's name has fewer characters
        if runs and name != "tensorboard" and not draft.known(f"{name}.name"):
            draft.put(f"{slot}.name", str(runs[0].value), "name")
