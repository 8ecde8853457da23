"""Tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import StageError

if TYPE_CHECKING:
    from stages.evaluate.lm import EvaluateLm


def run_tasks(config: EvaluateLm, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Task -> its numbers, and the version of its definition, JSON. Raises StageError for a name
    that lm-eval does not know."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise StageError(
            f"tasks need lm_eval: {error}", hint="pip install 'pipetrain[evaluate]'"
        ) from error
    folder = config.task_folder and str(Path(config.task_folder).expanduser())
    manager = TaskManager(include_path=folder)
    known = {*manager.all_tasks}
    for name in config.tasks:
        if name not in known:
            raise StageError(f"lm_eval knows no task `{name}`", hint="lm_eval ls tasks lists them")
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=config.batch_size),
        tasks=list(config.tasks),
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        task_manager=manager,
    )
    results = {
        task: {**_numbers(facts), "version": str(found["versions"].get(task))}
        for task, facts in found["results"].items()
    }
    return results


def _numbers(facts: Mapping[str, Any]) -> dict[str, float | None]:
    """What is a number among a task's facts, under lm-eval's names (`METRIC,FILTER`)."""
    found = {name: value for name, value in facts.items() if isinstance(value, int | float)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
