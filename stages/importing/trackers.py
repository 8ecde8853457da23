"""The keys that say which trackers follow a training, and how."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from stages.importing import rules
from stages.importing.rules import RuleResult, Table, outcome, rule, table

TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
"""Trackers of a recipe, `track.NAME`, as `report_to` calls them. The facts of each are called
NAME.FIELD, and NAME.use switches it on."""
ASKED = "report_to"
"""Fact: the trackers that are asked for by their names."""
RECORDED = "metrics.jsonl in the run folder has it all"
DISABLED = "disabled"
"""A mode of wandb in which nothing is kept."""
other_tracker = rule(f"untranslated recipes do not have this tracker; {RECORDED}")
own_run = rule("untranslated each run of a recipe starts a new run in the tracker")


def report_to(value: Any) -> RuleResult:
    """Read the names of trackers."""
    names = [] if rules.is_off(value) else [each.lower() for each in rules.names(value)]
    names = [each for each in names if each != "none"]
    if "all" in names:
        why = "untranslated means every tracker that is installed, and a recipe names them"
        return outcome(f"{why} -- name them: report_to: [wandb]")
    ours = [each for each in TRACKERS if each in names]
    others = [each for each in names if each not in TRACKERS]
    if others:
        why = f"untranslated recipes have no tracker {', '.join(others)}; {RECORDED}"
        return outcome(why, fact=ASKED if ours else "", content=ours)
    return rules.translated(ASKED, ours) if ours else rules.unset()


def _address(value: Any) -> str:
    """Return the address of a server, or a folder. Raises WrongValueError for one with a secret."""
    found = str(value)
    parts = urlsplit(found)
    if parts.username or parts.password or parts.query:
        hint = "set MLFLOW_TRACKING_URI in the environment"
        raise rules.WrongValueError(f"secrets do not belong in a recipe -- {hint}")
    return rules.path(found) if found.startswith((".", "~")) else found


WANDB = table("""
    project entity name group notes: wandb.* off= | tags: wandb.* names off=,[]
    mode: wandb.* online, offline, dryrun=offline, disabled off=
""")
"""Keys as `wandb.init` calls them."""
WANDB_PREFIXED: Table = {
    **{f"wandb_{name}": rule for name, rule in WANDB.items()},
    **table("""
    wandb_run_group: wandb.group off= | wandb_run_id: @own_run
    wandb_watch: untranslated gradients of single tensors are not recorded
    wandb_log_model: untranslated trackers get numbers and texts; weights stay in the run's folder
    """, own_run=own_run),
}  # fmt: skip
MLFLOW = table("""
    mlflow_tracking_uri: mlflow.tracking_uri address off=
    mlflow_experiment_name: mlflow.experiment off= | mlflow_run_name: mlflow.name off=
    hf_mlflow_log_artifacts: untranslated trackers get numbers and texts; weights stay in the \
        run's folder
""", address=_address)  # fmt: skip
TRAINER_TRACKERS = table("""
    report_to: @report_to | logging_dir: tensorboard.folder path off=
    project: trackio.project off= | trackio_space_id: trackio.space off=
    trackio_bucket_id trackio_static_space_id: untranslated trackio keeps the run on this machine, \
        or in track.trackio's space
""", report_to=report_to)  # fmt: skip
"""Fields of TrainingArguments. `run_name` names the recipe too."""
SWANLAB = table("""
    use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_experiment_name
    swanlab_description swanlab_mode swanlab_logdir swanlab_lark_webhook_url swanlab_log_completions
    swanlab_completion_log_interval swanlab_completion_max_buffer: @other
""", other=other_tracker)  # fmt: skip
