"""The content of an export: a model or an adapter, the files next to its weights, and its proof."""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from pipeline import ExportError, ModelSource, StageError, TensorReader, Weights, torch_dtype
from stages.adapter.compat import WEIGHTS
from stages.adapter.lora import AdaptedModel
from stages.export.manifest import Proof
from stages.export.plan import ExportPlan, digest, make_plan
from stages.export.proof import compare, loaded, logits, record, reference, token_ids, with_adapter
from stages.export.weight_files import Shard
from stages.model import compat
from stages.model.assets import save_tokenizer
from stages.model.config_checks import has_template
from stages.model.declared import outline
from stages.model.files import has_tokenizer, read_json
from stages.weights.converted import ConvertedReader
from stages.weights.views import CastReader, JoinedReader

MERGED_TOLERANCE = 1e-4
"""Largest relative difference of fp32 logits that may come from adding before multiplying."""

_TOKENIZER = 'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")'
_CHAT = """\
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
answer = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))"""
_TEXT = """\
inputs = tokenizer("Once upon a time", return_tensors="pt")
text = model.generate(**inputs, max_new_tokens=64)[0]
print(tokenizer.decode(text, skip_special_tokens=True))"""


@dataclass(frozen=True, kw_only=True)
class ModelContents:
    """A model in Hugging Face layout."""

    writer: ClassVar = "export.safetensors"
    library: ClassVar = "transformers"
    source: ModelSource
    trained: Weights
    prompt: str
    dtype: str
    max_shard_size: int

    def usage(self, folder: Path) -> str:
        """Python that loads what `folder` holds: the model, its tokenizer, and a chat template."""
        auto = compat.auto_class(read_json(folder / "config.json"))
        load = f'model = {auto}.from_pretrained("path/to/this/folder", dtype="auto")'
        if not has_tokenizer(folder):
            return f"from transformers import {auto}\n\n{load}"
        asked = _CHAT if has_template(folder) else _TEXT
        return f"from transformers import {auto}, AutoTokenizer\n\n{load}\n{_TOKENIZER}\n\n{asked}"

    @functools.cached_property
    def weights(self) -> Weights:
        """The trained weights, with adapters merged into them."""
        return self.source.merge_trained(self.trained)

    def plan(self, beside: str) -> ExportPlan:
        """The tensors and their files; `beside` is a digest of everything else. Raises
        StageError."""
        view = self.source.export_view
        return make_plan(view, self.weights, self.dtype, self.max_shard_size, beside=beside)

    def save_beside(self, folder: Path, *, dtype: str) -> None:
        """Write the files that others need next to the weights."""
        self.source.export_view.save_assets(folder, dtype=dtype)

    def prove(self, folder: Path, plan: ExportPlan) -> Proof:
        """Load the folder and compare its logits with the trained ones. Raises ExportError."""
        ids = token_ids(self.source, self.prompt)
        if self.weights is not self.trained:
            merged = logits(reference(self.source.export_view, self.weights), ids)
            compare(merged, trained_logits(self.source, self.trained, ids), MERGED_TOLERANCE)
        trusted = compat.is_remote_code(plan.outline)
        with loaded(folder, plan.passed, trust_remote_code=trusted) as model:
            name, trained = type(model).__name__, type(plan.outline).__name__
            if name != trained:
                raise ExportError(f"the export loads as {name}, trained was {trained}")
            dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
            found = logits(model, ids)
            del model
        gc.collect()
        # Both run on the CPU, one after the other, the reference one block at a time.
        expected = logits(reference(self.source.export_view, plan.tensors, dtypes), ids)
        return record(ids, found, expected)

    def close(self) -> None:
        """Close the weights that adapters were merged into."""
        if self.weights is not self.trained:
            self.weights.close()


@dataclass(frozen=True, kw_only=True)
class AdapterContents:
    """`adapter_model.safetensors` and `adapter_config.json`, with the model's tokenizer."""

    writer: ClassVar = "export.adapter"
    library: ClassVar = "peft"
    source: AdaptedModel
    trained: Weights
    prompt: str
    dtype: str

    def usage(self, folder: Path) -> str:
        """Python that loads the adapter."""
        imports, options = "from peft import AutoPeftModelForCausalLM\n", 'dtype="auto"'
        if self.source.quantize is not None:
            imports += "from transformers import BitsAndBytesConfig\n"
            bits = f'load_in_4bit=True, bnb_4bit_quant_type="{self.source.quantize}"'
            options += f", quantization_config=BitsAndBytesConfig({bits})"
        onto_base = imports.replace("AutoPeftModelForCausalLM", "PeftModel")
        load = 'PeftModel.from_pretrained(base, "path/to/this/folder")'
        if self.source.location is None:
            base = f"base = ...  # {self.source.name}, loaded with {options}"
            return f"{onto_base}\n{base}\nmodel = {load}"
        config: Any = outline(self.source.export_view).config
        auto = compat.auto_class(config.to_dict())
        if auto != "AutoModelForCausalLM":
            base = f'{auto}.from_pretrained("{self.source.location}", {options})'
            return f"{onto_base}from transformers import {auto}\n\nbase = {base}\nmodel = {load}"
        load = f'AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder", {options})'
        return f"{imports}\nmodel = {load}"

    def plan(self, beside: str) -> ExportPlan:
        """The tensors and their file; `beside` is a digest of everything else. Raises
        StageError."""
        held = set(self.trained.names())
        missing = [name for name in self.source.trained if name not in held]
        if missing:
            raise StageError(f"the checkpoint has no {missing[0]}: it is of another adapter")
        files = self._cast(ConvertedReader(self.trained, self.source.changes_to_file()))
        parts = [Shard(file=WEIGHTS, tensors={n: files.spec(n) for n in files.names()})]
        return ExportPlan(
            outline=outline(self.source.export_view),
            tensors=files,
            files=files,
            parts=parts,
            dtype=self.dtype,
            digest=digest(parts, self.trained.identity, beside),
        )

    def save_beside(self, folder: Path, *, dtype: str) -> None:
        """Write peft's configuration, and the tokenizer if the model has one."""
        self.source.save_config(folder)
        with contextlib.suppress(StageError):
            save_tokenizer(self.source.tokenizer(), folder)

    def prove(self, folder: Path, plan: ExportPlan) -> Proof:
        """Load the adapter onto the model and compare logits in fp32. Raises ExportError."""
        ids = token_ids(self.source, self.prompt)
        expected = trained_logits(self.source, self._cast(self.trained), ids)
        base = self.source.export_view
        with contextlib.closing(base.weights()) as own:
            found = logits(with_adapter(base, own, folder), ids)
        return record(ids, found, expected)

    def _cast(self, reader: TensorReader) -> TensorReader:
        """Tensors in the dtype of the file."""
        dtype = torch_dtype(self.dtype)
        return CastReader(reader, lambda _: dtype)


Contents = ModelContents | AdapterContents


def trained_logits(source: ModelSource, trained: TensorReader, ids: Tensor) -> Tensor:
    """The trained model's logits in fp32, shape (1, length, vocabulary): from a checkpoint's values
    and, for tensors that it left out, the source's."""
    plain = source.inference_view
    with contextlib.closing(plain.weights()) as own:
        return logits(reference(plain, JoinedReader(trained, own)), ids)
