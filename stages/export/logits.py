"""The logits that a model computes on a prompt, with one block in memory at a time if need be."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline import ExportError, ModelSource, StageError, TensorReader
from pipeline.hardware import free_memory
from stages.adapter.compat import PREFIX, import_peft, name_in_file, quiet
from stages.model import compat
from stages.model.declared import outline, refuse_differences, ties

if TYPE_CHECKING:
    pass


ROOM = 2 << 30
"""Bytes that must stay free beside a model that is loaded whole."""
ON_DISK = {"": "disk"}
"""Where the modules of a model are that is too large for memory."""


def logits(model: Any, ids: Tensor) -> Tensor:
    """Logits in fp32, shape (1, length, vocabulary), with plain attention."""
    model.eval()
    compat.compute_plainly(model)
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result.float()


@contextlib.contextmanager
def loading(failed: str) -> Iterator[None]:
    """Silence transformers while it loads. Raises ExportError, beginning with `failed`, when it
    cannot."""
    try:
        with compat.quiet():
            yield
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, StageError) as error:
        hint = "--trust-remote-code" if "trust_remote_code" in str(error) else ""
        raise ExportError(f"{failed}: {error}", hint=hint) from error


@contextlib.contextmanager
def loaded(folder: Path, *, trust_remote_code: bool) -> Iterator[nn.Module]:
    """The model in a folder, as a user loads it; unless it fits into memory, its weights stay on
    disk and are read when they are used. Raises ExportError when transformers cannot load it, or
    finds tensors missing or too many."""
    from transformers import AutoModelForCausalLM

    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if not _fits(folder):
            scratch = tempfile.TemporaryDirectory(prefix=".offload-", dir=folder.parent)
            options = {"device_map": ON_DISK, "offload_folder": stack.enter_context(scratch)}
        with loading("transformers cannot load the export"):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
            )
            refuse_differences(
                str(folder), model, info["missing_keys"], info["unexpected_keys"],
                [str(key[0]) for key in info["mismatched_keys"]],
            )  # fmt: skip
        yield model


def _fits(folder: Path) -> bool:
    """Whether host memory has room for all weights of the folder at once."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size + size // 4 + ROOM < free_memory()


class LazyTensors(dict[str, Any]):
    """Tensors by name, each read when it is looked up: the values are functions of the name."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)(name)


def reference(
    source: ModelSource, tensors: TensorReader, dtypes: Mapping[str, torch.dtype] | None = None
) -> nn.Module:
    """The declared module with the weights of `tensors` in `dtypes` (None: fp32), each block of
    which is read when it runs and released afterwards."""
    model = outline(source)
    if dtypes is None:
        dtypes = {
            name: torch.float32 if tensor.is_floating_point() else tensor.dtype
            for name, tensor in model.state_dict().items()
        }
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    tied = ties(model)

    def read(name: str) -> Tensor:
        return tensors.read(tied.get(name, name)).to(dtypes[name])

    values = LazyTensors(dict.fromkeys(dtypes, read))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: values[name] for name in tensors.names() if name not in parameters}
    model.load_state_dict(buffers, strict=False, assign=True)
    external = (type(module).__name__ for module in source.external_parameter_modules(model))
    return _by_blocks(model, values, {*compat.block_classes(model), *external})


def _by_blocks(model: nn.Module, values: LazyTensors, blocks: Collection[str]) -> nn.Module:
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


def with_adapter(source: ModelSource, own: TensorReader, folder: Path) -> nn.Module:
    """The source's module in fp32 with the adapter in `folder`, loaded by peft; its own weights
    are read block by block while it runs. Raises ExportError when peft cannot load the adapter."""
    peft = import_peft()
    module = outline(source)
    tied, blocks = ties(module), compat.block_classes(module)
    with loading("peft cannot load the adapter"), quiet():
        model = peft.PeftModel.from_pretrained(
            module, str(folder), low_cpu_mem_usage=True, autocast_adapter_dtype=False
        )
        # peft has put the adapter where the model is: on the meta device.
        adapter = peft.load_peft_weights(str(folder), device="cpu")

    def read(name: str) -> Tensor:
        in_file = name_in_file(name)
        if in_file in adapter:
            tensor: Tensor = adapter[in_file]
            return tensor.float()
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        plain = plain.replace(".original_module.", ".")
        return own.read(tied.get(plain, plain)).float()

    layers = (one for one in model.modules() if isinstance(one, peft.tuners.lora.LoraLayer))
    together = {*blocks, *(type(layer).__name__ for layer in layers)}
    return _by_blocks(model, LazyTensors(dict.fromkeys(model.state_dict(), read)), together)
