"""The recipe that the facts make: what each slot holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline import (
    DataError,
    StageError,
)
from pipeline.importing import (
    Request,
)
from stages.importing.engines import HIDDEN, STAGE_3
from stages.importing.report import Draft, Report
from stages.importing.training import checkpoint, optimizer, train

UNUSED = (
    "adapter", "classes", "dataset", "ddp.", "eval_", "fsdp.", "global_batch", "loss.",
    "output_name", "parallel.", "policy", "publish", "quantization", "revision", "save_",
    "schedule_steps", "warmup_", "zero.",
)  # fmt: skip
"""Beginnings of the names of facts that may stay unused: they have no effect without others."""


def compose(report: Report, request: Request, name: str) -> Draft:
    """Return the recipe that the facts make. Its name is `name` unless they give one."""
    draft = Draft(report)
    _header(draft, name)
    _model(draft, request)
    _adapter(draft)
    _precision(draft)
    _data(draft, request)
    optimizer(draft)
    _wrap(draft)
    checkpoint(draft)
    train(draft, request)
    draft.slot("consolidate", "consolidate.stream")
    draft.slot("export", "export.safetensors")
    _publish(draft)
    draft.copy_all()
    report.ignore_unused(UNUSED)
    return draft


def _header(draft: Draft, name: str) -> None:
    report = draft.report
    fact = "name" if report.given("name") else "output_name"
    draft.put("name", report.value(fact, name), fact)
    if report.value("data_seed") == report.value("seed"):
        report.ignore("data_seed")
    report.refuse("data_seed", why="a recipe has one seed", hint="set it as seed")


FLOATING = "the branch, as before; better the commit in `revision`"


def _model(draft: Draft, request: Request) -> None:
    report = draft.report
    draft.slot("model", "model.hf")
    name, revision = report.value("model"), report.value("revision")
    if request.model is not None:
        report.ignore("model", "revision", why="--model replaces it")
        name, _, revision = request.model.partition("@")
    if name is None:
        draft.lacks("model.path", "a folder (./model), a GGUF file or a hub id")
    elif (local := Path(name).expanduser()).exists():
        draft.put("model.path", str(local.absolute()), "model")
    else:
        draft.put("model.path", name, "model")
        if revision:
            draft.put("model.revision", revision, "revision")
        if not re.fullmatch("[0-9a-f]{40}", revision or ""):
            draft.put("model.allow_floating_revision", True, note=FLOATING)


def _adapter(draft: Draft) -> None:
    report = draft.report
    facts = report.facts("adapter.")
    if report.value("adapter"):
        draft.slot("adapter", "adapter.lora", "adapter")
        for name, value in (("rank", 16), ("alpha", 32.0), ("dropout", 0.05)):
            report.default(f"adapter.{name}", value, "TRL's default")
        if not report.given("adapter.targets"):
            what = "ends of layers' names, or all-linear; peft chose by the architecture"
            draft.lacks("adapter.targets", what)
        if report.given("quantize"):
            kind = report.value("quantization", "nf4")
            draft.put("adapter.quantize", kind, "quantize", "quantization")
    elif not report.given("adapter"):
        why, hint = "means LoRA, or nothing without use_peft", "set use_peft to true or false"
        report.refuse(*facts, why=why, hint=hint, blocks=True)
    if not report.value("adapter"):
        why = "weights that are trained are not held in 4 bits"
        report.refuse("quantize", why=why, hint="set use_peft")


def _precision(draft: Draft) -> None:
    report = draft.report
    draft.slot("precision", "precision.policy")
    report.default("precision.compute", "fp32", "no mixed precision is asked for")
    if report.value("precision.compute") != "fp16":
        report.ignore("precision.initial_loss_scale", "precision.loss_scale_growth_interval")


def _data(draft: Draft, request: Request) -> None:
    report = draft.report
    if request.data:
        report.ignore("data", "dataset", why="--data replaces it")
    files = [str(Path(each).expanduser().absolute()) for each in request.data]
    files = files or ([report.value("data")] if report.given("data") else [])
    keys = {entry.key for entry in report.of("data.sequence_length")}
    if files or not report.given("dataset"):
        draft.slot("data", _stage_of(files))
    else:  # a script of transformers for plain text has blocks, a script of TRL has rows
        draft.slot("data", "data.text" if "block_size" in keys else "data.chat")
        _hub_sources(draft)
    if files:
        draft.put("data.files", files, "data")
    elif not report.given("dataset"):
        draft.lacks("data.files", "text files, or use: data.chat for conversations")
    if draft.slots["data"]["use"] == "data.text":
        report.ignore("data.packing", why="data.text fills every sample")
        masks = [fact for fact in LOSS if report.value(fact)]
        report.refuse(*masks, why="data.text trains on every token", hint="use data.chat")
    else:
        _loss(draft, files)
    if report.given("data.heldout_files"):
        report.ignore("data.heldout_fraction", why="there are files to evaluate on")
    draft.copy("data.heldout_files")
    draft.copy("data.heldout_fraction")


LOSS = ("loss.completion", "loss.assistant")


def _hub_sources(draft: Draft) -> None:
    report = draft.report
    names = {"dataset": "dataset", "config": "dataset.config"}
    source = {name: report.value(fact) for name, fact in names.items() if report.known(fact)}
    splits = {
        "sources": ("dataset.split", report.value("dataset.split", "train")),
        "heldout_sources": ("dataset.heldout", report.value("dataset.heldout")),
    }
    for key, (fact, split) in splits.items():
        if split is not None:
            one = {**source, "split": split, "allow_floating_revision": True}
            draft.put(f"data.{key}", [one], *names.values(), fact, note=FLOATING)


def _loss(draft: Draft, files: list[str]) -> None:
    """Set which tokens are trained on; TRL's default depends on the form of the rows."""
    report = draft.report
    completion, assistant = map(report.value, LOSS)
    given = any(map(report.given, LOSS))
    pairs = {"prompt", "completion"} <= _first_row(files).keys() if files else None
    loss = trained_tokens(completion, assistant, pairs=pairs)
    if loss is None and given:
        why = "TRL then trains on whole conversations, but on the completions alone of prompts"
        report.refuse("loss.assistant", why=why, hint="set data.loss: all or completion")
    elif loss is None:
        draft.lacks("data.loss", "TRL's is `all` for conversations, `completion` for prompts")
    elif files and not pairs and not given:
        note = "the assistant's words; TRL's default is `all` of a conversation"
        draft.put("data.loss", "completion", note=note)
    else:
        note = "rows have no prompt, and TRL then trains on all of them" if completion else ""
        draft.put("data.loss", loss, *LOSS, note=note if loss == "all" else "")


def trained_tokens(
    completion: bool | None, assistant: bool | None, *, pairs: bool | None
) -> str | None:
    """Return the `loss` of data.chat that equals TRL 1.16's completion_only_loss and
    assistant_only_loss. `pairs` says whether rows have a prompt and a completion. The loss is None
    where it depends on the rows and `pairs` is None. In a conversation, `completion` is the
    assistant's words."""
    if assistant:
        return "assistant" if completion is False else "completion"
    if completion is False or pairs is False:
        return "all"
    return "completion" if completion or pairs else None


def _stage_of(files: list[str]) -> str:
    """Return the data stage for the form of the first row."""
    from stages.data.formats import KEYS

    keys = _first_row(files).keys()
    rows = any(name != "text" and keys >= set(needed) for name, needed in KEYS.items())
    return "data.chat" if rows else "data.text"


def _first_row(files: list[str]) -> dict[str, Any]:
    from stages.data.rows import TEXT, Reading, rows

    if not files or files[0].endswith(TEXT):
        return {}
    try:
        first = next(rows(Path(files[0]), Reading()), None)
    except (DataError, StageError, OSError):
        return {}  # `pipe check` and the run report what is wrong with the file
    return first.value if first is not None else {}


def _wrap(draft: Draft) -> None:
    report = draft.report
    use = _strategy(report)
    draft.slot("wrap", use, "distributed", "strategy")
    if use == "wrap.zero":
        _zero(draft)
    elif use == "wrap.fsdp":
        _fsdp(draft)
    for fact in ("parallel.replicate", "parallel.shard"):
        if use != "wrap.fsdp" and report.value(fact, 1) > 1:
            hint = "set distributed_type: FSDP"
            report.refuse(fact, why="accelerate takes it with FSDP alone", hint=hint, blocks=True)


def _strategy(report: Report) -> str:
    asked, stage = report.value("distributed") or report.value("strategy"), "zero.stage"
    if report.given(stage) and asked in (None, "wrap.zero"):
        return "wrap.zero" if report.value(stage) else "wrap.ddp"
    if report.value(stage):
        why = f"contradicts {asked}, which another file asks for"
        report.refuse(stage, why=why, blocks=True)
    return "wrap.ddp" if asked in (None, "one") else str(asked)


def _fsdp(draft: Draft) -> None:
    report = draft.report
    if report.value("parallel.replicate", 1) > 1:
        report.ignore("fsdp.sharding")
        draft.put("wrap.sharding", "hybrid_shard", "parallel.replicate")
        draft.copy("parallel.shard", "wrap.shard_size")
    policy, classes = report.value("policy"), report.value("classes")
    if policy == "block" or (classes and policy is None):
        draft.put("wrap.units", classes or "block", "classes", "policy")


NVME = (
    ".buffer_count", ".buffer_size", ".max_in_cpu", ".path", ".pipeline_read",
    ".pipeline_write",
)  # fmt: skip


def _zero(draft: Draft) -> None:
    report = draft.report
    report.default("zero.stage", 2, "accelerate's default")
    stage = report.value("zero.stage")
    for fact in report.facts("zero."):
        if not report.known(fact):
            _automatic(draft, fact)
    report.ignore(*(f"zero.{name}" for name in STAGE_3 if stage < 3))
    report.ignore(*(("zero.overlap_comm",) if stage == 1 else ()))
    if stage == 3:
        report.ignore("zero.allgather_bucket_size", "zero.round_robin_gradients")
    for block in ("zero.offload_optimizer", "zero.offload_param"):
        device = report.value(f"{block}.device", "none")
        nowhere = device == "none" or (block == "zero.offload_param" and stage < 3)
        for fact in report.facts(f"{block}."):
            if nowhere or (fact.endswith(NVME) and device != "nvme"):
                report.ignore(fact)


def _automatic(draft: Draft, fact: str) -> None:
    """Set a size that is `auto` as transformers does, if the model's hidden size is known."""
    hidden = _hidden_size(Path(draft.slots["model"].get("path", "")))
    if hidden is not None and fact in HIDDEN:
        value = HIDDEN[fact](hidden)
        draft.report.default(fact, value, f"auto, for hidden size {hidden}")
    else:
        size = "; it follows from the hidden size if --model is a folder" if fact in HIDDEN else ""
        draft.report.ignore(fact, why=f"auto: DeepSpeed's default{size}")


def _hidden_size(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    found = config.get("hidden_size") if isinstance(config, dict) else None
    return found if isinstance(found, int) else None


def _publish(draft: Draft) -> None:
    report = draft.report
    if not report.given("publish"):
        report.ignore(*report.facts("publish."), why="push_to_hub is off")
    elif str(report.value("publish.repo")).count("/") == 1:
        draft.slot("publish", "publish.hub", "publish")
    else:
        hint = "add a slot publish: {use: publish.hub, repo: owner/name}"
        report.refuse(*report.facts("publish"), why="a repository is called owner/name", hint=hint)
