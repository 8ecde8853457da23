"""The slots for the model and the data: what is trained, and on what."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline.errors import DataError, StageError
from pipeline.importing.translator import Request
from stages.importing.account import Draft

COMMIT = re.compile(r"[0-9a-f]{40}")
OPTION = "--model says it"


def model(draft: Draft, request: Request) -> None:
    """Slot `model`."""
    account = draft.account
    draft.slot("model", "model.hf")
    if request.model is not None:
        name, _, revision = request.model.partition("@")
        _source(draft, name, revision or None)
        account.dismiss("model", OPTION)
        account.dismiss("revision", OPTION)
    elif account.given("model"):
        _source(draft, account.value("model"), account.value("revision"))
    else:
        draft.lacks("model.path", "a folder (./model), a GGUF file or a hub id")
    draft.copy("tokenizer", "model.tokenizer")
    draft.copy("attention", "model.attention")
    draft.copy("trust_remote_code", "model.trust_remote_code")
    draft.copy("recompute", "model.activation_checkpointing", lambda on: {})
    draft.copy("recompute_offload", "model.activation_checkpointing.offload", bool)
    draft.copy("compiled", "model.compile", lambda on: {})
    draft.copy("compile_backend", "model.compile.backend")
    draft.copy("compile_mode", "model.compile.mode")
    draft.copy("liger", "model.kernels", lambda on: "liger")


def _source(draft: Draft, name: str, revision: str | None) -> None:
    local = Path(name).expanduser()
    if local.exists():
        draft.put("model.path", str(local.absolute()), "model")
        draft.account.dismiss("revision", "the model is a local one")
        return
    draft.put("model.path", name, "model")
    if revision is not None:
        draft.put("model.revision", revision, "revision")
    if revision is None or not COMMIT.fullmatch(revision):
        note = "the branch, as before; better the commit in `revision`"
        draft.put("model.allow_floating_revision", True, note=note)


def hidden_size(draft: Draft) -> int | None:
    """Of the model, if its config is at hand."""
    path = Path(draft.slots["model"].get("path", ""))
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    found = config.get("hidden_size") if isinstance(config, dict) else None
    return found if isinstance(found, int) else None


def data(draft: Draft, request: Request) -> None:
    """Slot `data`."""
    account = draft.account
    files = [str(Path(each).expanduser().absolute()) for each in request.data]
    given = files or ([account.value("data")] if account.given("data") else [])
    on_hub = not given and account.given("dataset")
    draft.slot("data", _hub_stage(draft) if on_hub else _stage(given))
    if on_hub:
        _from_hub(draft)
    elif given:
        draft.put("data.files", given, "data")
        if files:
            account.dismiss("data", "--data says it")
    else:
        draft.lacks("data.files", "text files, or use: data.chat for conversations")
    draft.copy("sequence_length", "data.sequence_length")
    for name in ("dataset", "dataset.config", "dataset.split", "dataset.heldout"):
        account.dismiss(name, "files are given")
    if draft.slots["data"]["use"] == "data.text":
        account.dismiss("packing", "data.text fills every sample")
    else:
        draft.copy("packing", "data.packing", bool)
        _loss(draft, given)
    if account.given("heldout"):
        draft.put("data.heldout_files", [account.value("heldout")], "heldout")
        account.dismiss("heldout_fraction", "there are files to evaluate on")
    else:
        draft.copy("heldout_fraction", "data.heldout_fraction", lambda share: min(share, 0.5))


def _loss(draft: Draft, files: list[str]) -> None:
    """Which tokens are trained on; what TRL does unless told depends on the form of the rows."""
    account = draft.account
    both = ("loss.completion", "loss.assistant")
    completion, assistant = map(account.value, both)
    pairs = _are_pairs(files) if files else None
    loss = trained_tokens(completion, assistant, pairs=pairs)
    if loss is None and any(map(account.given, both)):
        why = "TRL then trains on all of a conversation, but on a prompt's completion alone"
        account.refuse("loss.assistant", why, "set data.loss: all or completion")
    elif loss is None:
        draft.lacks("data.loss", "TRL's is `all` for conversations, `completion` for prompts")
    elif files and not pairs and not any(map(account.given, both)):
        note = "the assistant's words; TRL, unless told, trains on `all` of a conversation"
        draft.put("data.loss", "completion", note=note)
    else:
        note = "rows have no prompt, and TRL then trains on all of them" if completion else ""
        draft.put("data.loss", loss, *both, note=note if loss == "all" else "")


def trained_tokens(
    completion: bool | None, assistant: bool | None, *, pairs: bool | None
) -> str | None:
    """The `loss` of data.chat that does what TRL 1.16 does of completion_only_loss and
    assistant_only_loss for rows with a prompt and a completion, or without; None where it depends
    on the rows, and they are not known. `completion` of a conversation is what the assistant says.
    """
    if assistant:
        return "assistant" if completion is False else "completion"
    if completion is False or pairs is False:
        return "all"
    return "completion" if completion or pairs else None


def _are_pairs(files: list[str]) -> bool:
    return {"prompt", "completion"} <= _first_row(files).keys()


def _hub_stage(draft: Draft) -> str:
    """By whose script it is: transformers' for plain text has blocks, TRL's has rows."""
    keys = {entry.key for entry in draft.account.of("sequence_length")}
    return "data.text" if "block_size" in keys else "data.chat"


def _from_hub(draft: Draft) -> None:
    account = draft.account
    note = "the branch, as before; better the commit in `revision`"
    what = {"dataset": account.value("dataset"), "config": account.value("dataset.config")}
    source = {name: value for name, value in what.items() if value is not None}
    for key, fact, default in (
        ("sources", "dataset.split", "train"),
        ("heldout_sources", "dataset.heldout", None),
    ):
        split = account.value(fact, default)
        if split is not None:
            one = {**source, "split": split, "allow_floating_revision": True}
            draft.put(f"data.{key}", [one], "dataset", "dataset.config", fact, note=note)


def _stage(files: list[str]) -> str:
    """By what the first row of the first file is."""
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
        return {}  # `pipe check` and the run say what is wrong with it
    return first.value if first is not None else {}


DEFAULTS = {"adapter.rank": 16, "adapter.alpha": 32.0, "adapter.dropout": 0.05}
BY_ARCHITECTURE = "ends of layers' names, or all-linear; peft chose by the architecture"


def adapter(draft: Draft) -> None:
    """Slot `adapter`, if there is one."""
    account = draft.account
    if account.value("adapter"):
        _lora(draft)
    elif account.given("adapter.four_bits"):
        account.refuse(
            "adapter.four_bits", "weights that are trained are not held in 4 bits", "set use_peft"
        )
    account.dismiss("adapter", "is off")
    for fact in [f"adapter.{name}" for name in account.facts("adapter.")]:
        if account.given("adapter"):
            account.dismiss(fact, "is not read")
        elif fact != "adapter.four_bits":
            hint = "say which with use_peft: true or false"
            account.refuse(fact, "means LoRA, or nothing without use_peft", hint, blocks=True)


def _lora(draft: Draft) -> None:
    account = draft.account
    draft.slot("adapter", "adapter.lora")
    draft.put("adapter.use", "adapter.lora", "adapter")
    for fact, value in DEFAULTS.items():
        account.assume(fact, value, "TRL's default")
        draft.copy(fact, fact)
    if account.given("adapter.targets"):
        draft.copy("adapter.targets", "adapter.targets", _all)
    else:
        draft.lacks("adapter.targets", BY_ARCHITECTURE)
    draft.copy("adapter.rslora", "adapter.scaling", lambda on: "rslora")
    draft.copy("adapter.dora", "adapter.dora", bool)
    draft.copy(
        "adapter.modules", "adapter.train_also", lambda names: [f"*{name}.*" for name in names]
    )
    if account.given("adapter.four_bits"):
        kind = account.value("adapter.kind", "nf4")
        draft.put("adapter.quantize", kind, "adapter.four_bits", "adapter.kind")


def _all(names: list[str]) -> list[str] | str:
    return "all-linear" if names == ["all-linear"] else names
