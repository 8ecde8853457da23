"""An adapter's files, and their proof."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.contracts.precision import torch_dtype
from pipeline.contracts.tensors import TensorReader, Weights
from pipeline.errors import ExportError, StageError
from stages.adapter.compat import CONFIG, PREFIX, WEIGHTS, import_peft, name_in_file, quiet
from stages.adapter.nf4_linear import round_layers
from stages.export.card import Usage
from stages.export.contents import Contents, trained_logits
from stages.export.layout import Named, Shard, digest
from stages.export.logits import Values, by_blocks, logits
from stages.export.manifest import Proof
from stages.export.plan import ExportPlan
from stages.export.proof import compare, in_short, recognise, token_ids
from stages.export.verify import prove_whole
from stages.model import compat
from stages.model.assets import save_tokenizer
from stages.model.declared import outline, ties
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader
from stages.weights.views import CastReader

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stages.adapter.lora import AdaptedModel, FourBits


class AdapterContents(Contents):
    """`adapter_model.safetensors` and `adapter_config.json`, with the model's tokenizer."""

    writer = "export.adapter"

    def __init__(self, source: AdaptedModel, trained: Weights, *, dtype: str, prompt: str) -> None:
        self.source: AdaptedModel = source
        self.prompt = prompt
        self.usage = usage(source)
        self._trained = trained
        self._dtype = dtype

    def plan(self, beside: str) -> ExportPlan:
        held = set(self._trained.names())
        missing = [name for name in self.source.trained if name not in held]
        if missing:
            raise StageError(f"the checkpoint holds no {missing[0]}: it is not one of this adapter")
        dtype = torch_dtype(self._dtype)
        names = [renamed(name, name_in_file(name)) for name in self.source.trained]
        files = CastReader(ConvertedReader(self._trained, names), lambda _: dtype)
        tensors = [Named(name, *files.spec(name)) for name in files.names()]
        parts = [Shard(file=WEIGHTS, tensors=tensors)]
        return ExportPlan(
            outline=outline(self.source.export_view),
            tensors=files,
            files=files,
            parts=parts,
            dtype=self._dtype,
            digest=digest(parts, self._trained.identity, beside),
        )

    def save_beside(self, folder: Path, *, dtype: str) -> None:
        self.source.save_config(folder)
        with contextlib.suppress(StageError):  # it has none
            save_tokenizer(self.source.tokenizer(), folder)

    def prove(self, folder: Path, plan: ExportPlan) -> Proof:
        """In fp32, with the model's own weights one block at a time."""
        ids = token_ids(self.source, self.prompt)
        values = Rounded(self._trained, torch_dtype(self._dtype))
        expected = trained_logits(self.source, values, ids)
        base = self.source.export_view
        with contextlib.closing(base.weights()) as own:
            found = logits(with_adapter(outline(base), own, folder), ids)
        return Proof(
            prompt=ids[0].tolist(),
            logits=in_short(found),
            difference=compare(found, expected),
            quantize=self.source.quantize,
        )


def usage(source: AdaptedModel) -> Usage:
    """How peft loads the adapter."""
    lines, more = [], 'dtype="auto"'
    if source.quantize is not None:
        lines += [
            "from transformers import BitsAndBytesConfig",
            "",
            f"# It was trained on top of the model in {source.quantize}.",
            "config = BitsAndBytesConfig("
            f'load_in_4bit=True, bnb_4bit_quant_type="{source.quantize}")',
            "",
        ]
        more += ", quantization_config=config"
    if source.location is not None:
        load = f'AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder", {more})'
        lines += ["from peft import AutoPeftModelForCausalLM", "", f"model = {load}"]
    else:
        lines += [
            "from peft import PeftModel",
            "",
            f"base = ...  # {source.name}, loaded with {more}",
            'model = PeftModel.from_pretrained(base, "path/to/this/folder")',
        ]
    return Usage("peft", "\n".join(lines))


class Rounded(CastReader, Weights):
    """What was trained, in the dtype of the file."""

    def __init__(self, trained: Weights, dtype: torch.dtype) -> None:
        super().__init__(trained, lambda _: dtype)
        self.identity = trained.identity


def with_adapter(module: nn.Module, own: TensorReader, folder: Path) -> nn.Module:
    """`module`, on the meta device, with the adapter in `folder`, loaded by peft, in fp32; its own
    weights are read block by block while it runs. Raises ExportError when peft does not load it."""
    peft = import_peft()
    tied, names, blocks = ties(module), list(module.state_dict()), compat.block_classes(module)
    try:
        with quiet():
            model = peft.PeftModel.from_pretrained(
                module, str(folder), low_cpu_mem_usage=True, autocast_adapter_dtype=False
            )
            loaded = peft.load_peft_weights(str(folder), device="cpu")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ExportError(f"peft cannot load the adapter: {error}") from error
    values = Values(own, tied, dict.fromkeys(names, torch.float32))
    layers = (one for one in model.modules() if isinstance(one, peft.tuners.lora.LoraLayer))
    together = {*blocks, *(type(layer).__name__ for layer in layers)}
    return by_blocks(model, _WithAdapter(model, loaded, values), together)


class _WithAdapter(Mapping[str, "Tensor"]):
    """By peft's names: the adapter's tensors as peft reads them (it has put them where the model
    is, which is nowhere), the model's `own` as they are asked for."""

    def __init__(
        self, model: Any, adapter: Mapping[str, Tensor], own: Mapping[str, Tensor]
    ) -> None:
        self._names = list(model.state_dict())
        self._adapter = adapter
        self._own = own

    def __getitem__(self, name: str) -> Tensor:
        in_file = name_in_file(name)
        if in_file in self._adapter:
            return self._adapter[in_file].float()
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        return self._own[plain.replace(".original_module.", ".")]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def verify(folder: Path, tell: Callable[[str], object], *, trust_remote_code: bool) -> None:
    """Read every byte; then, if the model that the adapter belongs to is at hand, load both and run
    them. `tell` is told what has been proven. Raises ExportError for whatever is not as it was."""
    proof = prove_whole(folder, tell)
    base = json.loads((folder / CONFIG).read_text("utf-8")).get("base_model_name_or_path")
    if base is None or not (Path(base) / "config.json").is_file():
        tell(f"not run: its model is not here ({base})" if base else "not run: it names no model")
        return
    model = _loaded(base, folder, proof.quantize, trust_remote_code=trust_remote_code)
    told = logits(model, torch.tensor([proof.prompt]))
    difference = recognise(told, proof.logits, torch.float32)
    bits = f" in {proof.quantize}" if proof.quantize else ""
    tell(f"with {base}{bits} it computes what it did (largest difference {difference:.2g})")


def _loaded(base: str, folder: Path, quantize: FourBits | None, *, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    peft = import_peft()
    try:
        with compat.quiet(), quiet():
            model = AutoModelForCausalLM.from_pretrained(
                base,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
            if quantize is not None:
                round_layers(model, quantize)
            return peft.PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        hint = "--trust-remote-code" if "trust_remote_code" in str(error) else ""
        raise ExportError(f"{folder}: cannot be loaded onto {base}: {error}", hint=hint) from error
