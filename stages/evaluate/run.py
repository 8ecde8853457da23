"""The live side of evaluate.lm."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context
from pipeline.errors import StageError
from stages.data import tokenize
from stages.data.documents import read_documents
from stages.data.fields import Source
from stages.data.sources import open_source
from stages.evaluate.lm import FILE, WINDOW, EvaluatedModel
from stages.evaluate.perplexity import measure
from stages.model import compat
from stages.model.declared import outline

if TYPE_CHECKING:
    from stages.evaluate.lm import EvaluateLm


BRIEF = 2
"""Windows that a dry run scores."""


def evaluate(
    config: EvaluateLm,
    ctx: Context,
    exported: ExportedModel,
    source: ModelSource,
    *,
    briefly: bool = False,
) -> EvaluatedModel:
    """Measure on rank 0, tell all. `briefly` takes a few windows and no task."""
    text = None
    if ctx.dist.is_main:
        text = json.dumps(_measured(config, ctx, exported, source, briefly=briefly))
    results = json.loads(ctx.dist.broadcast_str(text))
    found = EvaluatedModel(file=ctx.run_dir / FILE, slot=ctx.slot or "evaluate", results=results)
    if ctx.dist.is_main:
        found.save()
    return found


def _measured(
    config: EvaluateLm, ctx: Context, exported: ExportedModel, source: ModelSource, *, briefly: bool
) -> dict[str, Any]:
    model = _load(exported.folder, source, on_gpu=ctx.dist.device.type == "cuda")
    results: dict[str, Any] = {"model": str(exported.folder)}
    if config.files:
        whole = replace(config, window=_window(config, model))
        results["text"] = _text(whole, model, source, BRIEF if briefly else None)
        shown = "  ".join(f"{name} {_shown(value)}" for name, value in results["text"].items())
        ctx.log.info("%s", shown)
    if config.tasks and not briefly:
        results["tasks"] = run_tasks(config, model, source.tokenizer())
        for task, numbers in results["tasks"].items():
            told = [f"{name} {_shown(value)}" for name, value in numbers.items()]
            ctx.log.info("%s: %s", task, "  ".join(told))
    return results


def _text(config: EvaluateLm, model: Any, source: ModelSource, most: int | None) -> dict[str, Any]:
    tokenizer = source.tokenizer()
    start = []
    if config.prepend_bos:
        start = [tokenize.required_id(tokenizer, "bos_token", "prepend_bos")]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokenize.check_ids(source, max(ids, default=0))
        return start + ids

    opened = open_source(Source(files=config.files))
    documents = read_documents(
        opened.parts, opened.reading(), text_key=config.text_key, unit=config.documents
    )
    totals = measure(config, model, documents, encode, most=most)
    return totals.results(bytes_are_scored=config.prepend_bos and most is None)


def _load(folder: Path, source: ModelSource, *, on_gpu: bool) -> Any:
    """The export as a user loads it, in eval mode."""
    from transformers import AutoModelForCausalLM

    declared = outline(source.export_view)
    kind: Any = type(declared) if compat.is_remote_code(declared) else AutoModelForCausalLM
    places = {"device_map": "auto"} if on_gpu else {}
    try:
        with compat.quiet():
            model = kind.from_pretrained(folder, dtype="auto", local_files_only=True, **places)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise StageError(f"transformers cannot load {folder}: {error}") from error
    return model.eval()


def _window(config: EvaluateLm, model: Any) -> int:
    """As asked for, or as the model allows."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most: int = positions or WINDOW
    if config.window is not None and positions is not None and config.window > positions:
        raise StageError(
            f"window is {config.window}, and the model has {positions} positions",
            hint=f"set window: {positions}",
        )
    return config.window or min(most, WINDOW)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
