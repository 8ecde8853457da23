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


def compose(report: Report, request: Request, name: str, data: Fill) -> Draft:
    """Return the recipe that the facts make. Its name is `name` unless they give one, and `data`
    fills the slot of that name."""
    draft = Draft(report)
    named = "name" if report.given("name") else "output_name"
    draft.put("name", report.value(named, name), named)
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
    report = draft.report
    draft.slot("model", "model.hf")
    name, revision = report.value("model"), report.value("revision")
    if request.model is not None:
        report.ignore("model", "revision", why="--model replaces it")
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
    report = draft.report
    if report.value("adapter"):
        draft.slot("adapter", "adapter.lora", "adapter")
        for name, value in (("rank", 16), ("alpha", 32.0), ("dropout", 0.05)):
            report.default(f"adapter.{name}", value, "TRL's default")
        if not report.known("adapter.targets"):
            what = "ends of layers' names, or all-linear; peft chose by the architecture"
            draft.lacks("adapter.targets", what)
        if report.value("quantize"):
            kind = report.value("quantization", "nf4")
            draft.put("adapter.quantize", kind, "quantize", "quantization")
        return
    if not report.known("adapter"):
        why, hint = "means LoRA, or nothing without use_peft", "set use_peft to true or false"
        report.refuse(*report.facts("adapter."), why=why, hint=hint, blocks=True)
    why = "weights that are trained are not held in 4 bits"
    report.refuse("quantize", why=why, hint="train an adapter")


def _precision(draft: Draft) -> None:
    report = draft.report
    draft.slot("precision", "precision.policy")
    report.default("precision.compute", "fp32", "no mixed precision is asked for")
    if report.value("precision.compute") != "fp32":
        report.ignore("precision.tf32", why="no product is in fp32")
    if report.value("precision.compute") != "fp16":
        report.ignore("precision.initial_loss_scale", "precision.loss_scale_growth_interval")


def _wrap(draft: Draft, request: Request) -> None:
    report = draft.report
    use = _strategy(report)
    draft.slot("wrap", use, "distributed", "strategy")
    policy, classes = report.value("policy"), report.value("classes")
    if use == "wrap.zero":
        _zero(report)
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
    report = draft.report
    asked = {*report.value(ASKED, [])}
    if report.value("wandb.mode") == DISABLED:
        report.ignore(*report.facts("wandb."), why="wandb_mode is disabled")
        asked.discard("wandb")
    used = [name for name in TRACKERS if name in asked or report.value(f"{name}.use")]
    for name in used:
        slot, use = "track" if len(used) == 1 else f"track_{name}", f"{name}.use"
        draft.slot(slot, f"track.{name}", use, *([ASKED] if name in asked else []))
        for fact in report.facts(f"{name}."):
            if fact != use:
                draft.copy(fact, f"{slot}.{fact.removeprefix(f'{name}.')}")
        runs = report.of("name")  # as the file has it; a recipe's name has fewer characters
        if runs and name != "tensorboard" and not report.known(f"{name}.name"):
            draft.put(f"{slot}.name", str(runs[0].value), "name")
