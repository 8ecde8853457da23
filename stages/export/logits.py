"""What a model computes on a prompt, with no more of it in memory than is needed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.contracts.model import ModelSource
from pipeline.contracts.tensors import TensorReader
from pipeline.errors import ExportError, StageError
from stages.model import compat
from stages.model.declared import outline, refuse_differences, ties

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextlib.contextmanager
def loaded(folder: Path, declared: nn.Module, *, whole: bool) -> Iterator[nn.Module]:
    """The model in a folder, as a user loads it; unless `whole`, its blocks stay on disk and come
    into memory one at a time. Raises ExportError when it does not load as what `declared` is."""
    from transformers import AutoModelForCausalLM

    kind: Any = type(declared) if compat.is_remote_code(declared) else AutoModelForCausalLM
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if not whole:
            scratch = tempfile.TemporaryDirectory(prefix=".offload-", dir=folder.parent)
            options = {
                "device_map": _blocks_on_disk(declared),
                "offload_folder": stack.enter_context(scratch),
            }
        try:
            with compat.quiet():
                model, info = kind.from_pretrained(
                    folder, dtype="auto", local_files_only=True, output_loading_info=True, **options
                )
            refuse_differences(
                str(folder), model, info["missing_keys"], info["unexpected_keys"],
                [str(key[0]) for key in info["mismatched_keys"]],
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError, ImportError, StageError) as error:
            raise ExportError(f"transformers cannot load the export: {error}") from error
        if type(model).__name__ != type(declared).__name__:
            raise ExportError(
                f"the export loads as {type(model).__name__}, trained was {type(declared).__name__}"
            )
        yield model


def _blocks_on_disk(declared: nn.Module) -> dict[str, str]:
    blocks = compat.block_classes(declared)

    def places(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
        if type(module).__name__ in blocks:
            yield name, "disk"
        elif any(type(below).__name__ in blocks for below in module.modules()):
            for child, below in module.named_children():
                yield from places(f"{name}.{child}".lstrip("."), below)
        else:
            yield name, "cpu"

    return dict(places("", declared))


def reference(
    source: ModelSource, tensors: TensorReader, dtypes: Mapping[str, torch.dtype]
) -> nn.Module:
    """The declared module with the weights of `tensors` in `dtypes`, each block of which is read
    when it runs and let go of afterwards."""
    model = outline(source)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    values = Values(tensors, ties(model), dtypes)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: values[name] for name in tensors.names() if name not in parameters}
    model.load_state_dict(buffers, strict=False, assign=True)
    external_parameter_modules = (
        type(module).__name__ for module in source.external_parameter_modules(model)
    )
    return by_blocks(model, values, {*compat.block_classes(model), *external_parameter_modules})


def by_blocks(model: nn.Module, values: Mapping[str, Tensor], blocks: Collection[str]) -> nn.Module:
    """`model`, which runs with `values`; modules of the classes `blocks` are in memory one at a
    time."""
    from accelerate.hooks import attach_align_device_hook

    attach_align_device_hook(
        model,
        execution_device=torch.device("cpu"),
        offload=True,
        weights_map=values,
        preload_module_classes=list(blocks),
    )
    return model


class Values(Mapping[str, "Tensor"]):
    """Reads each tensor when it is asked for. `tied` leads from names to those that are read."""

    def __init__(
        self, tensors: TensorReader, tied: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._tensors = tensors
        self._tied = tied
        self._dtypes = dtypes

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors.read(self._tied.get(name, name)).to(self._dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)


def logits(model: Any, ids: Tensor) -> Tensor:
    """In fp32, shape (1, length, vocabulary)."""
    model.eval()
    compat.compute_plainly(model)
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result.float()
