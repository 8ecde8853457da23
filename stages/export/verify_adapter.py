"""Prove again that an exported adapter is whole and, with its model, computes what it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ExportError
from stages.adapter.compat import import_peft, quiet
from stages.adapter.files import CONFIG
from stages.adapter.four_bit_linear import round_layers
from stages.export.logits import logits
from stages.export.proof import recognise
from stages.export.verify import prove_whole
from stages.model import compat

if TYPE_CHECKING:
    from stages.adapter.artifact import FourBits


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
