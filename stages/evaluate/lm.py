"""The stage `evaluate.lm`: how well the exported model predicts text."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline import Context, ExportedModel, ModelSource, PlanView, Problem, UsageError
from pipeline.utils import pins_asked, require_code_trust
from stages.data.sources import file_problems
from stages.evaluate.settings import WINDOW, EvaluatedModel, EvaluationFields


@dataclass(frozen=True, kw_only=True)
class EvaluateLm(EvaluationFields):
    """Measure the exported model: its perplexity on text files, and tasks of lm-eval.

    Perplexity is exp(-sum of log p(token | tokens before it) / number of tokens), over the tokens
    of all documents together, so that long documents count for more. A document longer than
    `window` is read in windows that overlap, and each token is scored once, in the first window
    that has it. A document's first token is not scored, unless `prepend_bos` puts one before it;
    then `bits_per_byte` is the same sum in bits over the bytes of the text in UTF-8, which compares
    models of different tokenizers.

    Results go to the screen and to `evaluation.json` in the run's folder. Only rank 0 loads the
    model in the dtype of the export, while other ranks wait: on a machine with GPUs spread over
    all visible ones and, where they are too small, host memory; else in host memory. Memory: the
    size of the export, and up to three times `batch_size` x `window` x vocabulary x 4 bytes.
    """

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if not self.files and not self.tasks:
            yield Problem(key="files", message="nothing to measure", hint="give files or tasks")
        if self.files:
            yield from file_problems("files", self.files)
        window = self.window or WINDOW
        if self.stride is not None and self.stride > window:
            message = f"{self.stride} leaves out tokens between windows of {window}"
            yield Problem(key="stride", message=message, hint="set a stride of at most window")
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            message = "needs the package lm_eval, which is not installed"
            yield Problem(key="tasks", message=message, hint="pip install 'pipetrain[evaluate]'")
        if pins_asked() and (fetched := [*self._fetched()]):
            message = f"lm-eval names no commit of the data of {', '.join(fetched)}"
            hint = "define it in `task_folder` with a `revision` in its `dataset_kwargs`"
            yield Problem(key="tasks", message=message, hint=hint)
        if self.task_folder is not None and not Path(self.task_folder).expanduser().is_dir():
            yield Problem(key="task_folder", message=f"no such folder: {self.task_folder}")
        elif self.task_folder is not None:
            try:
                self._require_trust()
            except UsageError as error:
                yield Problem(key="task_folder", message=str(error))
        for key in ("task_folder", "num_fewshot", "limit"):
            if not self.tasks and getattr(self, key) is not None:
                yield Problem(key=key, message="has no effect without tasks")

    def run(self, ctx: Context, exported: ExportedModel, model: ModelSource) -> EvaluatedModel:
        from stages.evaluate.run import evaluate

        self._require_trust()
        return evaluate(self, ctx, exported, model, briefly=False)

    def run_dry(self, ctx: Context, exported: ExportedModel, model: ModelSource) -> EvaluatedModel:
        from stages.evaluate.run import evaluate

        return evaluate(self, ctx, exported, model, briefly=True)

    def _fetched(self) -> Iterator[str]:
        """Yield the tasks that the task folder does not define."""
        folder = None if self.task_folder is None else Path(self.task_folder).expanduser()
        files = [] if folder is None else [*folder.rglob("*.yaml")]
        text = "\n".join(file.read_text("utf-8", "replace") for file in files if file.is_file())
        own = re.findall(r"^(?:task|group|tag):\s*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
        yield from (task for task in self.tasks if task not in own)

    def _require_trust(self) -> None:
        """Raise UsageError unless what the task folder makes lm-eval run may run."""
        if self.task_folder is not None:
            require_code_trust(f"the tasks in {self.task_folder}")
