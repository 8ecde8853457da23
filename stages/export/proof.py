"""Prove that a written model is the trained one: by its bytes, then by loading and running it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.layout import CODES
from pipeline.errors import ExportError, StageError
from pipeline.hardware.host import free_memory
from stages.export.layout import Shard
from stages.export.logits import loaded, logits, reference
from stages.export.manifest import Position, Proof
from stages.export.writer import Sums, check
from stages.model.declared import listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeline.contracts.model import ModelSource
    from pipeline.contracts.tensors import TensorReader
    from pipeline.distributed.process_group import DistContext

TOLERANCE = 1e-5
"""Largest difference of logits, relative to the largest of them; the same kernels run on the same
numbers, so only their scheduling can tell them apart."""
TOP = 8
"""Logits of a position that are remembered."""
ROOM = 2 << 30
"""Bytes that must stay free beside a model that is loaded whole."""


def prove_files(
    folder: Path, parts: Sequence[Shard], sums: Mapping[str, Sums], dist: DistContext
) -> None:
    """Read every file back (collective): names, shapes, dtypes, and the bytes of each tensor.

    Raises ExportError.
    """
    for part in parts:
        prove_header(folder / part.file, part)
        wrong = check(folder / part.file, part, sums[part.file], dist)
        if wrong:
            raise ExportError(
                f"{folder / part.file} does not hold the trained values in {listed(wrong)}",
                hint="the disk or the memory of this machine is not to be trusted",
            )


def prove_header(file: Path, part: Shard) -> None:
    """The file's own account of its tensors is the planned one. Raises ExportError."""
    from safetensors import SafetensorError, safe_open

    expected = {tensor.name: (CODES[tensor.dtype], tensor.shape) for tensor in part.tensors}
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{file} cannot be read back: {error}") from error
    wrong = {
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    }
    if wrong:
        raise ExportError(f"{file} differs from what was written in {listed(wrong)}")
    head = part.header()
    with file.open("rb") as stream:
        same = stream.read(len(head)) == head
    if not same or file.stat().st_size != len(head) + part.size:
        raise ExportError(f"{file} is laid out otherwise than it was written")


def prove_model(
    folder: Path, source: ModelSource, tensors: TensorReader, outline: nn.Module, prompt: str
) -> Proof:
    """Load the folder as a user would and compare logits on the prompt with a reference.

    The reference is the declared module with the checkpoint's values, in the loaded one's dtypes,
    one block in memory at a time. So is the loaded one when it does not fit into host memory. Both
    run with plain attention on the CPU, one after the other. Raises ExportError.
    """
    ids = token_ids(source, prompt)
    with loaded(folder, outline, whole=fits(folder)) as model:
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        found = logits(model, ids)
        del model
    gc.collect()
    expected = logits(reference(source, tensors, dtypes), ids)
    difference = compare(found, expected)
    return Proof(prompt=ids[0].tolist(), logits=in_short(found), difference=difference)


def fits(folder: Path) -> bool:
    """Whether host memory has room for all weights of the folder at once."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size + size // 4 + ROOM < free_memory()


def token_ids(source: ModelSource, prompt: str) -> Tensor:
    """Shape (1, length)."""
    try:
        ids = source.tokenizer()(prompt)["input_ids"]
    except StageError:
        ids = [(7 * position + 3) % source.vocab_size for position in range(16)]
    return torch.tensor([ids or [0]])


def in_short(logits: Tensor) -> list[Position]:
    """Enough of logits, shape (1, length, vocabulary), to recognise them."""
    found = []
    for row in logits[0]:
        top = row.topk(min(TOP, row.numel()))
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        found.append(Position(norm=float(row.norm()), top=pairs))
    return found


def recognise(logits: Tensor, remembered: Sequence[Position], dtype: torch.dtype) -> float:
    """The largest difference between logits and what is remembered of them. Raises ExportError when
    it is more than another machine's kernels make of weights in `dtype`."""
    tolerance = max(TOLERANCE, 4 * torch.finfo(dtype).eps)
    if len(remembered) != logits.shape[1]:
        raise ExportError(f"logits at {logits.shape[1]} positions instead of {len(remembered)}")
    if any(token >= logits.shape[2] for one in remembered for token, _ in one.top):
        raise ExportError(f"logits of {logits.shape[2]} tokens only")
    known = torch.tensor([value for one in remembered for _, value in one.top])
    found = torch.stack(
        [row[token] for row, one in zip(logits[0], remembered, strict=True) for token, _ in one.top]
    )
    norms = torch.tensor([one.norm for one in remembered])
    scale = max(1.0, float(known.abs().max()))
    difference = float((found - known).abs().max())
    drift = float(((logits[0].norm(dim=-1) - norms) / norms.clamp(min=1e-9)).abs().max())
    if not (difference <= tolerance * scale and drift <= tolerance):
        raise ExportError(
            "the model computes something else than when it was exported: "
            f"logits differ by up to {difference:.3g}"
        )
    return difference


def compare(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> float:
    """The largest difference of logits, shape (1, length, vocabulary). Raises ExportError when it
    is more than `tolerance` of the largest expected one."""
    if found.shape != expected.shape:
        raise ExportError(
            f"the exported model gives logits of shape {tuple(found.shape)}, "
            f"the trained one {tuple(expected.shape)}"
        )
    if not bool(torch.isfinite(found).all()):
        raise ExportError("the exported model gives logits that are not finite")
    difference = float((found - expected).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    if not difference <= tolerance * scale:
        raise ExportError(
            f"the exported model computes something else than the trained one: "
            f"logits differ by up to {difference:.3g}"
        )
    return difference
