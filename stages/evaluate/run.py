"""Run evaluate.lm: load the export, score text, run tasks."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import NO_TARGET, Context, ExportedModel, ModelSource, Sample, StageError
from pipeline.utils import optional
from stages.batches.layout import collate
from stages.data import tokenize
from stages.data.documents import read_documents
from stages.data.sources import Source, open_source
from stages.evaluate.settings import FILE, WINDOW, EvaluatedModel, EvaluationFields
from stages.export.proof import loading
from stages.model import compat
from stages.model.declared import outline
from stages.model.files import read_json
from stages.model.rotary_compat import choose_by_document, depends_on_length, placed
from stages.objectives.cross_entropy import RowLoss
from stages.objectives.judge import measured
from stages.objectives.scoring import ModelScorer

BRIEF = 2
"""Windows that a dry run scores."""


def evaluate(
    config: EvaluationFields,
    ctx: Context,
    exported: ExportedModel,
    source: ModelSource,
    *,
    briefly: bool,
) -> EvaluatedModel:
    """Measure on rank 0 (collective). `briefly` takes a few windows and no task."""
    results: dict[str, Any] = {"model": str(exported.folder)}
    if ctx.dist.is_main:
        model = _load(exported.folder, source, on_gpu=ctx.dist.device.type == "cuda")
        if config.files:
            results["text"] = _text(config, model, source, BRIEF if briefly else None)
            ctx.log.info("%s", _shown(results["text"]))
        if config.tasks and not briefly:
            results["tasks"] = run_tasks(config, model, source.tokenizer())
            for task, numbers in results["tasks"].items():
                ctx.log.info("%s: %s", task, _shown(numbers))
    text = json.dumps(results) if ctx.dist.is_main else None
    results = json.loads(ctx.dist.broadcast_str(text))
    found = EvaluatedModel(file=ctx.run_dir / FILE, slot=ctx.slot or "evaluate", results=results)
    if ctx.dist.is_main:
        found.save()
    return found


def _shown(numbers: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in numbers.items()
    )


def _load(folder: Path, source: ModelSource, *, on_gpu: bool) -> Any:
    """The export as a user loads it, in eval mode."""
    import transformers

    auto = getattr(transformers, compat.auto_class(read_json(folder / "config.json")))
    trusted = compat.is_remote_code(outline(source.export_view))
    places = {"device_map": "auto"} if on_gpu else {}
    with loading(f"transformers cannot load {folder}"):
        model = auto.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=trusted, **places
        )
    choose_by_document(model)
    return model.eval()


def _text(
    config: EvaluationFields, model: Any, source: ModelSource, most: int | None
) -> dict[str, Any]:
    """Perplexity on the files, of at most `most` windows."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if config.window is not None and positions is not None and config.window > positions:
        raise StageError(
            f"window is {config.window}, and the model has {positions} positions",
            hint=f"set window: {positions}",
        )
    window = config.window or min(positions or WINDOW, WINDOW)
    tokenizer, start = source.tokenizer(), []
    if config.prepend_bos:
        start = [tokenize.required_id(tokenizer, "bos_token", "prepend_bos")]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokenize.check_ids(source, max(ids, default=0))
        return start + ids

    opened = open_source(Source(files=config.files))
    documents = read_documents(opened.parts, text_key=config.text_key, unit=config.documents)
    return measure(config, model, (each.text for each in documents), encode, window, most)


def run_tasks(config: EvaluationFields, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Task -> its numbers and version, as JSON. Raises StageError for an unknown task."""
    with optional("tasks need lm_eval", hint="pip install 'pipetrain[evaluate]'"):
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    folder = config.task_folder and str(Path(config.task_folder).expanduser())
    manager = TaskManager(include_path=folder)
    known = {*manager.all_tasks}
    for name in config.tasks:
        if name not in known:
            raise StageError(f"lm_eval knows no task `{name}`", hint="lm_eval ls tasks lists them")
    # lm_eval does not say where padding begins, on which the angles of a row would depend.
    size = 1 if depends_on_length(model) else config.batch_size
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size),
        tasks=list(config.tasks),
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        task_manager=manager,
    )
    return {
        task: {**_numbers(facts), "version": str(found["versions"].get(task))}
        for task, facts in found["results"].items()
    }


def _numbers(facts: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers among a task's facts, under lm-eval's names (`METRIC,FILTER`)."""
    found = {name: value for name, value in facts.items() if isinstance(value, int | float)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def measure(
    config: EvaluationFields,
    model: Any,
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    window: int,
    most: int | None,
) -> dict[str, Any]:
    """Score the documents, `batch_size` windows at a time, and no more than `most` windows of all
    of them; the results as JSON. Raises StageError if nothing was scored, or the model returns NaN
    or infinity."""
    totals, nats = Counter[str](), 0.0
    stride = min(config.stride or window // 2, window)

    def samples() -> Iterator[Sample]:
        for document in documents:
            totals["documents"] += 1
            totals["bytes"] += len(document.encode())
            yield from windows(encode(document), window, stride)

    left = itertools.islice(samples(), most)
    measure, scorer = RowLoss(), ModelScorer(model)
    device = model.get_input_embeddings().weight.device
    while batch := list(itertools.islice(left, config.batch_size)):
        laid_out = placed(model, collate(batch, 0, device))
        with torch.no_grad():
            nats += float(measured(measure, scorer, laid_out, laid_out).sum())
        totals["tokens"] += sum(int((sample.labels != NO_TARGET).sum()) for sample in batch)
    if not totals["tokens"]:
        raise StageError("no document has two tokens", hint="set prepend_bos: true")
    mean = nats / totals["tokens"]
    if not math.isfinite(mean):
        raise StageError(f"the model's mean loss is {mean}")
    results = {
        "perplexity": math.exp(mean) if mean < math.log(1e300) else None,
        "loss": mean,
        "tokens": totals["tokens"],
        "documents": totals["documents"],
    }
    if config.prepend_bos and most is None:
        results["bits_per_byte"] = nats / math.log(2) / totals["bytes"]
    return results


def windows(ids: Sequence[int], window: int, stride: int) -> Iterator[Sample]:
    """The windows of a document, `stride` apart, each of at most `window` input tokens. Labels are
    the tokens that no earlier window has: each token but the first is a label once, and one beyond
    the first window has at least `window - stride` before it."""
    tokens = np.asarray(ids, dtype=np.int64)
    scored = 0
    for start in range(0, max(len(tokens) - 1, 0), stride):
        stop = min(start + window, len(tokens) - 1)
        labels = tokens[start + 1 : stop + 1].copy()
        labels[: scored - start] = NO_TARGET
        yield Sample(input_ids=tokens[start:stop], labels=labels)
        scored = stop
        if stop == len(tokens) - 1:
            return
