"""The data slot of scripts of transformers and TRL: a file, or a data set of the hub."""

from __future__ import annotations

from pipeline.importing import Request
from stages.importing.report import Draft
from stages.importing.sources import NO_COMMIT, is_local, local_files, put_files, requested


def script_data(draft: Draft, request: Request) -> None:
    """Fill the slot `data`."""
    report = draft.report
    if requested(draft, request):
        report.ignore("data", "dataset", why="--data replaces it")
    elif report.given("data"):
        put_files(draft, [report.value("data")], "data")
    elif report.given("dataset"):
        # A script of transformers for plain text has blocks, a script of TRL has rows.
        blocks = any(entry.key == "block_size" for entry in report.of("data.sequence_length"))
        name = report.value("dataset")
        if is_local(name):
            put_files(draft, local_files(name), "dataset")
            why, hint = "files are read as a whole", "put those rows in a separate file"
            report.refuse("dataset.config", "dataset.heldout", why=why, hint=hint)
            report.ignore("dataset.split")
        else:
            draft.slot("data", "data.text" if blocks else "data.chat")
            _hub_sources(draft)
    else:
        draft.slot("data", "data.text")
        draft.lacks("data.files", "text files, or use: data.chat for conversations")
    _loss(draft)
    if report.given("data.heldout_files"):
        report.ignore("data.heldout_fraction", why="there are files to evaluate on")


def _hub_sources(draft: Draft) -> None:
    report = draft.report
    names = {"dataset": "dataset", "config": "dataset.config"}
    source = {name: report.value(fact) for name, fact in names.items() if report.known(fact)}
    splits = {"sources": ("dataset.split", "train"), "heldout_sources": ("dataset.heldout", None)}
    for key, (fact, default) in splits.items():
        split = report.value(fact, default)
        if split is not None:
            one = {**source, "split": split}
            draft.put(f"data.{key}", [one], *names.values(), fact, note=NO_COMMIT)


LOSS = ("loss.completion", "loss.assistant")


def _loss(draft: Draft) -> None:
    """Set `loss` of data.chat where it follows from TRL 1.16's completion_only_loss and
    assistant_only_loss alone. In a conversation, `completion` is the assistant's words."""
    report = draft.report
    completion, assistant = map(report.value, LOSS)
    if draft.slots["data"]["use"] == "data.text":
        report.ignore("data.packing", why="data.text fills every sample")
        masks = [fact for fact in LOSS if report.value(fact)]
        report.refuse(*masks, why="data.text trains on every token", hint="use data.chat")
    elif assistant:
        draft.put("data.loss", "assistant" if completion is False else "completion", *LOSS)
    elif completion is False:
        draft.put("data.loss", "all", *LOSS)
    else:
        draft.lacks("data.loss", "TRL's is `all` for conversations, `completion` for prompts")
        why = "TRL then trains on whole conversations, but of prompts only on the completions"
        report.refuse(*LOSS, why=why, hint="set data.loss: all or completion")
