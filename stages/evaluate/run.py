"""Load an exported model, score text with it, run tasks; imports torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import NO_TARGET, ModelSource, Sample, StageError
from pipeline.utils import expanded, optional
from stages.batches.layout import collate
from stages.data import tokenize
from stages.data.documents import read_documents
from stages.data.sources import OpenedSource, Source
from stages.export.proof import loading
from stages.model import compat
from stages.model.declared import outline
from stages.model.files import read_json
from stages.model.rotary_compat import choose_by_document, document_angles, placed
from stages.objectives.cross_entropy import RowLoss, measured
from stages.objectives.scoring import ModelScorer


def load(folder: Path, source: ModelSource, *, on_gpu: bool) -> Any:
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


def measure_files(
    model: Any, source: ModelSource, files: str | tuple[str, ...], *, text_key: str, unit: str,
    prepend_bos: bool, window: int | None, usual: int, stride: int | None, batch_size: int,
    most: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Score the documents in files, `batch_size` windows at a time, and no more than `most` windows
    of all of them; the results as JSON. Without a `window` it is the `usual` one, or as many tokens
    as the model has positions. Raises StageError if nothing was scored, or the model returns NaN or
    infinity."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if window is not None and positions is not None and window > positions:
        raise StageError(
            f"window is {window}, and the model has {positions} positions",
            hint=f"set window: {positions}",
        )
    window = window or min(positions or usual, usual)
    tokenizer, totals, nats = source.tokenizer(), Counter[str](), 0.0
    start = [tokenize.required_id(tokenizer, "bos_token", "prepend_bos")] if prepend_bos else []
    parts = OpenedSource(Source(files=files)).parts

    def samples() -> Iterator[Sample]:
        for document in read_documents(parts, text_key=text_key, unit=unit):
            (ids,) = tokenize.plain_ids(tokenizer, [document.text])
            tokenize.check_ids(source, max(ids, default=0))
            totals["documents"] += 1
            totals["bytes"] += len(document.text.encode())
            yield from windows(start + ids, window, min(stride or window // 2, window))

    left = itertools.islice(samples(), most)
    scorer, device = ModelScorer(model), model.get_input_embeddings().weight.device
    while batch := list(itertools.islice(left, batch_size)):
        laid_out = placed(model, collate(batch, 0, device))
        with torch.no_grad():
            nats += float(measured(RowLoss(), scorer, laid_out, laid_out).sum())
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
    if prepend_bos and most is None:
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


def run_tasks(
    model: Any, tokenizer: Any, tasks: Sequence[str], *, folder: str | None, batch_size: int,
    num_fewshot: int | None = None, limit: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Task -> its numbers, under lm-eval's names (`METRIC,FILTER`), and version, as JSON. Raises
    StageError for an unknown task."""
    with optional("tasks need lm_eval", hint="pip install 'pipetrain[evaluate]'"):
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=folder and str(expanded(folder)))
    for name in tasks:
        if name not in manager.all_tasks:
            raise StageError(f"lm_eval knows no task `{name}`", hint="lm_eval ls tasks lists them")
    # lm_eval does not say where padding begins, on which the angles of a row would depend.
    size = 1 if document_angles(model) else batch_size
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size), tasks=list(tasks),
        num_fewshot=num_fewshot, limit=limit, task_manager=manager,
    )  # fmt: skip
    return {
        task: {
            **{
                name: value if math.isfinite(value) else None
                for name, value in facts.items()
                if isinstance(value, int | float)
            },
            "version": str(found["versions"].get(task)),
        }
        for task, facts in found["results"].items()
    }
