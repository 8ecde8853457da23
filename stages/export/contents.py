"""The content of an export: a model or an adapter, the files next to its weights, and its proof."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from pipeline import (
    Context,
    ExportError,
    ModelSource,
    ResourceNeed,
    StageError,
    TensorReader,
    Weights,
    dtype_name,
    torch_dtype,
)
from pipeline.checkpoint import CODES
from stages.adapter.compat import WEIGHTS
from stages.adapter.lora import AdaptedModel
from stages.adapter.peft_files import changes_to_file, save_config
from stages.export import proof
from stages.export.target import Proof, WeightFile, target_of
from stages.export.weight_files import planned, shards
from stages.model import compat
from stages.model.as_exported import AS_SOURCE, module_tensors
from stages.model.assets import save_tokenizer
from stages.model.config_checks import has_template
from stages.model.declared import outline
from stages.model.files import has_tokenizer, read_json
from stages.weights.converted import ConvertedReader
from stages.weights.views import JoinedReader, cast_reader

MERGED_TOLERANCE = 1e-4
"""Largest relative difference of fp32 logits that may come from adding before multiplying."""
BUFFERS = 64 << 20
"""Bytes for tensors in transit, and for activations of a short prompt."""

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
class ExportPlan:
    """Readers of the tensors, and the files they go to; known before any weight is read."""

    outline: nn.Module
    """The module on the meta device, its weights tied."""
    tensors: TensorReader
    """By the names of the module."""
    files: TensorReader
    """By the names in the files."""
    parts: Mapping[str, WeightFile]
    dtype: str
    """Dtype of most of the weights, as in a recipe."""
    digest: str
    """Equal for plans that write the same bytes."""
    passed: Sequence[str] = ()
    """Names in the files of tensors that are the source's, byte for byte."""

    @property
    def total(self) -> int:
        """Bytes of all weight files."""
        return sum(part.size for part in self.parts.values())


def _digest(files: TensorReader, parts: Mapping[str, WeightFile], *facts: str) -> str:
    """Equal for exports that write the same bytes."""
    specs = {name: files.spec(name) for name in files.names()}
    described = [
        [file, [[name, shape, str(specs[name].dtype)] for name, (_, shape) in part.tensors.items()]]
        for file, part in parts.items()
    ]
    return hashlib.sha256(json.dumps([described, facts]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ModelContents:
    """A model in Hugging Face layout."""

    writer: ClassVar = "export.safetensors"
    library: ClassVar = "transformers"
    source: ModelSource
    trained: Weights
    prompt: str
    dtype: str
    """One of a recipe, or AS_SOURCE."""
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

    def plan(self, others: str) -> ExportPlan:
        """The tensors and their files; `others` is a digest of everything else. Raises StageError
        when the weights are not of the source's architecture."""
        view = self.source.export_view
        model, tensors = module_tensors(view, self.weights, self.dtype)
        changes = compat.changes_on_save(model, tensors.names())
        files: TensorReader = ConvertedReader(tensors, changes)
        own, passed = files.names(), view.passed_through()
        if passed is not None:
            if twice := sorted(set(own) & set(passed.names())):
                raise StageError(
                    f"{twice[0]} is a tensor of the model, and of the rest of its source"
                )
            files = JoinedReader(files, passed)
        specs = {name: files.spec(name) for name in files.names()}
        for name, spec in specs.items():
            if spec.dtype not in CODES:
                message = f"{name} has dtype {spec.dtype}, which safetensors files cannot hold"
                raise StageError(message)
        sizes = Counter[str]()
        for name in own:
            sizes[dtype_name(specs[name].dtype)] += specs[name].nbytes
        parts = shards(specs, self.max_shard_size)
        return ExportPlan(
            outline=model,
            tensors=tensors,
            files=files,
            parts=parts,
            dtype=max(("fp32", "bf16", "fp16"), key=lambda name: sizes[name]),
            digest=_digest(files, parts, self.weights.identity, others),
            passed=[] if passed is None else sorted(passed.names()),
        )

    def save_others(self, folder: Path, *, dtype: str) -> None:
        """Write the files that others need next to the weights."""
        self.source.export_view.save_assets(folder, dtype=dtype)

    def prove(self, folder: Path, plan: ExportPlan) -> Proof:
        """Load the folder and compare its logits with the trained ones. Raises ExportError."""
        ids = proof.token_ids(self.source, self.prompt)
        view = self.source.export_view
        if self.weights is not self.trained:
            merged = proof.logits(proof.reference(view, self.weights), ids)
            trained = proof.trained_logits(self.source, self.trained, ids)
            proof.compare(merged, trained, MERGED_TOLERANCE)
        trusted = compat.is_remote_code(plan.outline)
        with proof.loaded(folder, plan.passed, trust_remote_code=trusted) as model:
            name, declared = type(model).__name__, type(plan.outline).__name__
            if name != declared:
                raise ExportError(f"the export loads as {name}, trained was {declared}")
            dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
            found = proof.logits(model, ids)
            del model
        gc.collect()
        # Both run on the CPU, one after the other, the reference one block at a time.
        return proof.record(
            ids, found, proof.logits(proof.reference(view, plan.tensors, dtypes), ids)
        )

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
        if self.source.stage.quantize is not None:
            imports += "from transformers import BitsAndBytesConfig\n"
            bits = f'load_in_4bit=True, bnb_4bit_quant_type="{self.source.stage.quantize}"'
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

    def plan(self, others: str) -> ExportPlan:
        """The tensors and their file; `others` is a digest of everything else. Raises StageError
        for a checkpoint of another adapter."""
        held = set(self.trained.names())
        missing = [name for name in self.source.trained if name not in held]
        if missing:
            raise StageError(f"the checkpoint has no {missing[0]}: it is of another adapter")
        files = self._cast(ConvertedReader(self.trained, changes_to_file(self.source)))
        parts = {WEIGHTS: planned({name: files.spec(name) for name in files.names()})}
        return ExportPlan(
            outline=outline(self.source.export_view),
            tensors=files,
            files=files,
            parts=parts,
            dtype=self.dtype,
            digest=_digest(files, parts, self.trained.identity, others),
        )

    def save_others(self, folder: Path, *, dtype: str) -> None:
        """Write peft's configuration, and the tokenizer if the model has one."""
        save_config(self.source, folder)
        with contextlib.suppress(StageError):
            save_tokenizer(self.source.tokenizer(), folder)

    def prove(self, folder: Path, plan: ExportPlan) -> Proof:
        """Load the adapter onto the model and compare logits in fp32. Raises ExportError."""
        ids = proof.token_ids(self.source, self.prompt)
        expected = proof.trained_logits(self.source, self._cast(self.trained), ids)
        base = self.source.export_view
        with contextlib.closing(base.weights()) as own:
            found = proof.logits(proof.with_adapter(base, own, folder), ids)
        return proof.record(ids, found, expected)

    def _cast(self, reader: TensorReader) -> TensorReader:
        """Tensors in the dtype of the file."""
        dtype = torch_dtype(self.dtype)
        return cast_reader(reader, lambda _: dtype)


Contents = ModelContents | AdapterContents


def resource_need(
    dtype: str, folder: str | None, ctx: Context, source: ModelSource
) -> ResourceNeed:
    """Disk for a model's weight files; memory for one block and all outside of blocks."""
    model = outline(source.export_view)
    widest = torch.float32 if dtype == AS_SOURCE else torch_dtype(dtype)
    kinds = compat.block_classes(model)
    chosen = (module for module in model.modules() if type(module).__name__ in kinds)
    total, *blocks = (
        sum(tensor.numel() for tensor in module.parameters()) * widest.itemsize
        for module in (model, *chosen)
    )
    target, others = target_of(folder, ctx), 0
    if (passed := source.export_view.passed_through()) is not None:
        with contextlib.closing(passed):
            others = sum(passed.spec(name).nbytes for name in passed.names())
    return ResourceNeed(
        what=f"the export in {target.name}",
        disk=total + others,
        folder=target,
        memory=total - sum(blocks) + max(blocks, default=0) + BUFFERS,
    )
