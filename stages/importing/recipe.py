"""The recipe that the facts make: what each slot holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from pipeline.utils import COMMIT
from stages.importing.draft import NO_EFFECT, Draft
from stages.importing.engines import STAGE_3
from stages.importing.parallelism import parallelism
from stages.importing.sources import NO_COMMIT, is_local
from stages.importing.trackers import ASKED, DISABLED, TRACKERS
from stages.importing.training import optimizer, put_period, train

Fill: TypeAlias = Callable[[Draft], None]
_LOW = (*(f"zero.{name}" for name in STAGE_3), "zero.offload_param.", "zero.plus_plus.")
UNUSED: Mapping[int, tuple[str, ...]] = {
    0: _LOW, 1: (*_LOW, "zero.overlap_comm"), 2: _LOW,
    3: ("zero.allgather_bucket_size", "zero.round_robin_gradients"),
}  # fmt: skip
"""Stage of ZeRO -> beginnings of the facts that have no effect there."""


def compose(draft: Draft, name: str, data: Fill) -> Draft:
    """Make the recipe of the facts that were read. Its name is `name` unless they give one, and
    `data` fills the slot of that name."""
    named = "name" if draft.given("name") else "output_name"
    draft.put("name", draft.value(named, name), named)
    _model(draft)
    _adapter(draft)
    _precision(draft)
    data(draft)
    optimizer(draft)
    _wrap(draft)
    draft.slot("checkpoint", "checkpoint.sharded")
    put_period(draft, "save", "checkpoint.every")
    _trackers(draft)
    train(draft)
    draft.slot("consolidate", "consolidate.stream")
    draft.slot("export", "export.safetensors")
    draft.copy_all()
    return draft


def _model(draft: Draft) -> None:
    draft.slot("model", "model.hf")
    name, revision = draft.value("model"), draft.value("revision")
    if draft.request.model is not None:
        draft.drop("ignored --model replaces it", "model", "revision")
        name, _, revision = draft.request.model.partition("@")
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
        what = "ends of layers' names, or all-linear; peft chose by the architecture"
        draft.lacks("adapter.targets", what)
        if draft.value("quantize"):
            kind = draft.value("quantization", "nf4")
            draft.put("adapter.quantize", kind, "quantize", "quantization")
        return
    unsaid = "refused means LoRA, or nothing without use_peft !! set use_peft to true or false"
    draft.drop(unsaid, *draft.facts("adapter."), when=not draft.known("adapter"))
    draft.drop("refused weights that are trained are not held in 4 bits -- train an adapter",
               "quantize")  # fmt: skip


def _precision(draft: Draft) -> None:
    draft.slot("precision", "precision.policy")
    draft.default("precision.compute", "fp32", "no mixed precision is asked for")
    compute = draft.value("precision.compute")
    draft.drop("ignored no product is in fp32", "precision.tf32", when=compute != "fp32")
    scaling = ("precision.initial_loss_scale", "precision.loss_scale_growth_interval")
    draft.drop(NO_EFFECT, *scaling, when=compute != "fp16")


def _wrap(draft: Draft) -> None:
    use = _strategy(draft)
    draft.slot("wrap", use, "distributed", "strategy")
    policy, classes = draft.value("policy"), draft.value("classes")
    if use == "wrap.zero":
        _zero(draft)
    elif use == "wrap.fsdp" and (policy == "block" or (classes and policy is None)):
        draft.put("wrap.units", classes or "block", "classes", "policy")
    parallelism(draft, use)


def _strategy(draft: Draft) -> str:
    asked, stage = draft.value("distributed") or draft.value("strategy"), "zero.stage"
    if draft.given(stage) and asked in (None, "wrap.zero"):
        return "wrap.zero" if draft.value(stage) else "wrap.ddp"
    other = f"refused contradicts {asked}, which another file asks for !!"
    draft.drop(other, stage, when=bool(draft.value(stage)))
    return "wrap.ddp" if asked in (None, "one") else str(asked)


def _zero(draft: Draft) -> None:
    """Leave out what `pipe check` would refuse, as it has no effect."""
    draft.default("zero.stage", 2, "accelerate's default")
    stage = draft.value("zero.stage")
    unused = [fact for fact in draft.facts("zero.") if fact.startswith(UNUSED[stage])]
    for block in ("zero.offload_optimizer", "zero.offload_param"):
        device = draft.value(f"{block}.device", "none")
        unused += {"none": draft.facts(f"{block}."), "cpu": [f"{block}.path"]}.get(device, [])
    draft.drop(NO_EFFECT, *unused)


def _trackers(draft: Draft) -> None:
    """Add a slot for each tracker: `track`, or `track_wandb` and the like if there are several."""
    asked = {*draft.value(ASKED, [])}
    if draft.value("wandb.mode") == DISABLED:
        draft.drop("ignored wandb_mode is disabled", *draft.facts("wandb."))
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
