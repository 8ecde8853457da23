"""Prove that an export is the trained model, and later that it still is: by its bytes, then by
loading it and comparing logits, with one block in memory at a time if need be."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import (
    EXPORT_MANIFEST,
    DistContext,
    ExportError,
    ModelSource,
    StageError,
    TensorReader,
)
from pipeline.hardware import free_memory
from pipeline.utils import activity, plural, require_code_trust
from stages.adapter.compat import CONFIG, import_peft, name_in_file, name_without_updates, quiet
from stages.export import target
from stages.export.target import BLOCK, CARD, Manifest, Position, Proof
from stages.export.weight_files import prove_files
from stages.model import compat
from stages.model.declared import outline, refuse_differences, ties
from stages.model.files import kernels_named, read_json
from stages.weights.views import JoinedReader

ROOM = 2 << 30
"""Bytes that must stay free next to a model that is loaded whole."""
TOLERANCE = 1e-5
"""Largest difference of logits, relative to the largest of them; the same kernels run on the same
numbers, so only their scheduling can make a difference."""
TOP = 8
"""Logits of a position that are recorded."""


def logits(model: Any, ids: Tensor) -> Tensor:
    """Logits in fp32, shape (1, length, vocabulary), with plain attention."""
    model.eval()
    compat.compute_plainly(model)
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result.float()


@contextlib.contextmanager
def loading(failed: str) -> Iterator[None]:
    """Silence transformers. Raises ExportError, beginning with `failed`, when it cannot load."""
    try:
        with compat.quiet():
            yield
    except torch.OutOfMemoryError:  # of a GPU
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, StageError) as error:
        hint = "--trust-remote-code" if "trust_remote_code" in str(error) else ""
        raise ExportError(f"{failed}: {error}", hint=hint) from error


@contextlib.contextmanager
def loaded(
    folder: Path,
    passed: Sequence[str],
    *,
    trust_remote_code: bool,
    device: torch.device | None = None,
) -> Iterator[nn.Module]:
    """The model in a folder, as a user loads it, on a GPU if that is its `device`; unless it fits
    into host memory otherwise, its weights stay on disk and are read when they are used. Pickles
    are not read. Raises ExportError when transformers cannot load it, or finds tensors missing, or
    others too many than those `passed` through."""
    import transformers

    config = read_json(folder / "config.json")
    for kernel in () if trust_remote_code else kernels_named(config):
        require_code_trust(f"the hub's kernel {kernel}")
    auto = getattr(transformers, compat.auto_class(config))
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if device is not None and device.type != "cpu":
            options = {"device_map": {"": device}}
        elif not has_room(size, free_memory()):
            scratch = tempfile.TemporaryDirectory(prefix=".offload-", dir=folder.parent)
            options = {"device_map": {"": "disk"}, "offload_folder": stack.enter_context(scratch)}
        with loading("transformers cannot load the export"):
            model, info = auto.from_pretrained(
                folder, dtype="auto", local_files_only=True, use_safetensors=True,
                trust_remote_code=trust_remote_code, output_loading_info=True, **options,
            )  # fmt: skip
            unexpected = sorted(set(info["unexpected_keys"]) - set(passed))
            misshapen = [str(key[0]) for key in info["mismatched_keys"]]
            refuse_differences(str(folder), model, info["missing_keys"], unexpected, misshapen)
        yield model


def has_room(size: int, free: int) -> bool:
    """Whether `free` bytes have room for a model of `size` bytes, loaded whole and running."""
    return size + size // 4 + ROOM < free


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

    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: read(name) for name in tensors.names() if name not in parameters}
    model.load_state_dict(buffers, strict=False, assign=True)
    external = (type(module).__name__ for module in source.external_parameter_modules(model))
    return _by_blocks(model, read, dtypes, {*compat.block_classes(model), *external})


def trained_logits(source: ModelSource, trained: TensorReader, ids: Tensor) -> Tensor:
    """The trained model's logits in fp32, shape (1, length, vocabulary): from a checkpoint's values
    and, for tensors that it left out, the source's."""
    plain = source.inference_view
    with contextlib.closing(plain.weights()) as own:
        return logits(reference(plain, JoinedReader(trained, own)), ids)


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
        plain = name_without_updates(name)
        return own.read(tied.get(plain, plain)).float()

    layers = (one for one in model.modules() if isinstance(one, peft.tuners.lora.LoraLayer))
    together = {*blocks, *(type(layer).__name__ for layer in layers)}
    return _by_blocks(model, read, model.state_dict(), together)


def _by_blocks(
    model: nn.Module, read: Callable[[str], Tensor], names: Collection[str], blocks: Collection[str]
) -> nn.Module:
    """`model`, which runs with the tensors `names` that `read` returns, one module of the classes
    `blocks` at a time."""
    from accelerate.hooks import attach_align_device_hook

    class Tensors(dict[str, Any]):
        """Tensors that are read when they are looked up."""

        def __getitem__(self, name: str) -> Tensor:
            return read(name)

    attach_align_device_hook(
        model,
        execution_device=torch.device("cpu"),
        offload=True,
        weights_map=Tensors.fromkeys(names),
        preload_module_classes=list(blocks),
    )
    return model


def token_ids(source: ModelSource, prompt: str) -> Tensor:
    """The prompt, shape (1, length)."""
    try:
        ids = source.tokenizer()(prompt)["input_ids"]
    except StageError:
        ids = [(7 * position + 3) % source.vocab_size for position in range(16)]
    return torch.tensor([ids or [0]])


def compare(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> float:
    """The largest difference of logits, shape (1, length, vocabulary). Raises ExportError when it
    is more than `tolerance` of the largest expected one."""
    if found.shape != expected.shape:
        raise ExportError(
            f"the exported model returns logits of shape {tuple(found.shape)}, "
            f"the trained one {tuple(expected.shape)}"
        )
    difference = float((found - expected).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    if not difference <= tolerance * scale:
        raise ExportError(
            f"the exported model computes something else than the trained one: "
            f"logits differ by up to {difference:.3g}"
        )
    return difference


def record(ids: Tensor, found: Tensor, expected: Tensor) -> Proof:
    """The proof that an export computes `found`. Raises ExportError unless that is `expected`."""
    difference = compare(found, expected)
    top = found[0].topk(min(TOP, found.shape[-1]))
    rows = zip(found[0], top.indices.tolist(), top.values.tolist(), strict=True)
    positions = [
        Position(norm=float(row.norm()), top=list(zip(tokens, values, strict=True)))
        for row, tokens, values in rows
    ]
    return Proof(prompt=ids[0].tolist(), logits=positions, difference=difference)


def recognise(logits: Tensor, recorded: Sequence[Position], dtype: torch.dtype) -> float:
    """The largest difference between logits and the recorded ones. Raises ExportError when it is
    more than another machine's kernels make of weights in `dtype`."""
    tolerance = max(TOLERANCE, 4 * torch.finfo(dtype).eps)
    tokens = torch.tensor([[token for token, _ in one.top] for one in recorded])
    if len(tokens) != logits.shape[1] or int(tokens.max()) >= logits.shape[2]:
        raise ExportError(f"the exported model returns logits of shape {tuple(logits.shape)}")
    known = torch.tensor([[logit for _, logit in one.top] for one in recorded])
    norms = torch.tensor([one.norm for one in recorded])
    off = (logits[0].norm(dim=-1) - norms) / norms.clamp(min=1e-9)  # all logits may be 0
    compare(off, torch.zeros_like(off), tolerance)
    return compare(logits[0].gather(1, tokens), known, tolerance)


def verify(folder: Path, report: Callable[[str], object], *, trust_remote_code: bool) -> None:
    """Read every byte, then load the model, unless it is only an adapter, and run it; `report`
    takes a line for each step. Raises ExportError for any difference to the finished export."""
    with activity("reading every byte of the export"):
        found, proof = prove_bytes(folder, strict=True)
    report(f"as they were written: {plural(len(found.others), 'file')} other than weights")
    tensors = sum(len(entry.tensors) for entry in found.weights.values())
    files = plural(len(found.weights), "file")
    report(f"as they were written: {plural(tensors, 'tensor')} in {files}")
    if (folder / CONFIG).is_file():
        report("an adapter is not run again: that needs its base model")
        return
    with (
        activity("loading and running the model"),
        loaded(folder, found.passed, trust_remote_code=trust_remote_code) as model,
    ):
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        again = logits(model, torch.tensor([proof.prompt]))
        difference = recognise(again, proof.logits, coarsest)
    report(f"the model computes what it did (largest difference {difference:.2g})")


def prove_bytes(folder: Path, *, strict: bool) -> tuple[Manifest, Proof]:
    """The manifest and proof of a folder whose files are all as they were written. Unless `strict`,
    there may be more files, and another model card. Raises ExportError."""
    found = target.load(folder)
    if found is None or found.proof is None:
        raise ExportError(f"{folder}: no finished export: it has no {EXPORT_MANIFEST} with a proof")
    if found.block != BLOCK:
        raise ExportError(f"{folder}: written by another version, with other checksums")
    added = sorted(target.names_in(folder) - set(found.files))
    if strict and added:
        raise ExportError(f"{folder}: {added[0]} is not of this export")
    for name, expected in found.others.items():
        if name == CARD and not strict:
            continue
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name}: missing")
        if target.content_sum(folder / name) != expected:
            raise ExportError(f"{folder / name}: is not as it was written")
    prove_files(folder, found.weights, DistContext(device=torch.device("cpu")))
    return found, found.proof
