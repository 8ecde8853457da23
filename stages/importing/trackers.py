"""The slots of trackers, and the keys that say which and how."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from stages.importing import rules
from stages.importing.report import Draft
from stages.importing.rules import Rule, RuleResult, Table, WrongValueError, sets

TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
"""Trackers of a recipe, `track.NAME`, as `report_to` calls them. The facts of each are called
NAME.FIELD, and NAME.use switches it on."""
ASKED = "report_to"
"""Fact: the trackers that are asked for by their names."""
RECORDED = "metrics.jsonl in the run folder has it all"
DISABLED = "disabled"
"""A mode of wandb in which nothing is kept."""
_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", DISABLED: DISABLED}

other_tracker = rules.untranslated(f"recipes do not have this tracker; {RECORDED}")
own_run = rules.untranslated("each run of a recipe starts a new run in the tracker")
weights = rules.untranslated("trackers get numbers and texts; weights stay in the run's folder")


def text(fact: str) -> Rule:
    """Return a rule for a text, which may be empty."""
    return sets(fact, str, off=("",))


def named(*trackers: str) -> Rule:
    """Return a rule that asks for trackers, whatever the value."""
    return lambda value: RuleResult(outcome="translated", fact=ASKED, content=[*trackers])


def report_to(value: Any) -> RuleResult:
    """Read the names of trackers."""
    names = [] if rules.is_off(value) else [each.lower() for each in rules.names(value)]
    names = [each for each in names if each != "none"]
    if "all" in names:
        why = "means every tracker that is installed, and a recipe names them"
        return RuleResult(outcome="not translated", why=why, hint="name them: report_to: [wandb]")
    ours = [each for each in TRACKERS if each in names]
    others = [each for each in names if each not in TRACKERS]
    fact = ASKED if ours else ""
    if others:
        why = f"recipes have no tracker {', '.join(others)}; {RECORDED}"
        return RuleResult(outcome="not translated", why=why, fact=fact, content=ours)
    found = RuleResult(outcome="translated", fact=fact, content=ours)
    return found if ours else rules.unset()


def _address(value: Any) -> str:
    """Return the address of a server, or a folder. Raises WrongValueError for one with a secret."""
    found = str(value)
    parts = urlsplit(found)
    if parts.username or parts.password or parts.query:
        hint = "set MLFLOW_TRACKING_URI in the environment"
        raise WrongValueError("secrets do not belong in a recipe", hint)
    return rules.path(found) if found.startswith((".", "~")) else found


WANDB: Table = {
    **{name: text(f"wandb.{name}") for name in ("project", "entity", "name", "group", "notes")},
    "tags": sets("wandb.tags", rules.names, off=("", [])),
    "mode": sets("wandb.mode", rules.choice(_MODES), off=("",)),
}
"""Keys as `wandb.init` calls them."""
WANDB_PREFIXED: Table = {
    **{f"wandb_{name}": rule for name, rule in WANDB.items()},
    "wandb_run_group": WANDB["group"],
    "wandb_run_id": own_run,
    "wandb_watch": rules.untranslated("gradients of single tensors are not recorded"),
    "wandb_log_model": weights,
}
MLFLOW: Table = {
    "mlflow_tracking_uri": sets("mlflow.tracking_uri", _address, off=("",)),
    "mlflow_experiment_name": text("mlflow.experiment"),
    "mlflow_run_name": text("mlflow.name"),
    "hf_mlflow_log_artifacts": weights,
}
TRAINER_TRACKERS: Table = {
    "report_to": report_to,
    "logging_dir": sets("tensorboard.folder", rules.path, off=("",)),
    "project": text("trackio.project"),
    "trackio_space_id": text("trackio.space"),
    **rules.each_way(
        "trackio_bucket_id trackio_static_space_id",
        rules.untranslated("trackio keeps the run on this machine, or in track.trackio's space"),
    ),
}
"""Fields of TrainingArguments. `run_name` names the recipe too."""


def put_trackers(draft: Draft) -> None:
    """Add a slot for each tracker: `track`, or `track_wandb` and the like if there are several."""
    report = draft.report
    asked = {*report.value(ASKED, [])}
    if report.value("wandb.mode") == DISABLED:
        report.ignore(*report.facts("wandb."), why="wandb_mode is disabled")
        asked.discard("wandb")
    used = [name for name in TRACKERS if name in asked or report.value(f"{name}.use")]
    for name in used:
        slot = "track" if len(used) == 1 else f"track_{name}"
        switches = [f"{name}.use", *([ASKED] if name in asked else [])]
        draft.slot(slot, f"track.{name}", *switches)
        _fields(draft, slot, name)


def _fields(draft: Draft, slot: str, name: str) -> None:
    report = draft.report
    for fact in report.facts(f"{name}."):
        if fact != f"{name}.use":
            draft.copy(fact, f"{slot}.{fact.removeprefix(f'{name}.')}")
    runs = report.of("name")  # as the file has it; a recipe's name has fewer characters
    if runs and name != "tensorboard" and not report.known(f"{name}.name"):
        draft.put(f"{slot}.name", str(runs[0].value), "name")
