"""Prove that an export is the trained model, and later that it still is: by its bytes, then by
loading and running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from pipeline import DistContext, ExportError, ModelSource, StageError, TensorSpec
from pipeline.checkpoint import DTYPES
from stages.adapter.compat import CONFIG
from stages.export import manifest
from stages.export.logits import loaded, logits
from stages.export.manifest import BLOCK, CARD, Manifest, Position, Proof, WeightFile, names_in
from stages.export.weight_files import Shard, prove_files

TOLERANCE = 1e-5
"""Largest difference of logits, relative to the largest of them; the same kernels run on the same
numbers, so only their scheduling can make a difference."""
TOP = 8
"""Logits of a position that are recorded."""


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


def record(ids: Tensor, found: Tensor, expected: Tensor) -> Proof:
    """The proof that an export computes `found` on `ids`. Raises ExportError unless that is
    `expected`, the trained model's logits."""
    difference = compare(found, expected)
    positions = []
    for row in found[0]:
        top = row.topk(min(TOP, row.numel()))
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        positions.append(Position(norm=float(row.norm()), top=pairs))
    return Proof(prompt=ids[0].tolist(), logits=positions, difference=difference)


def recognise(logits: Tensor, recorded: Sequence[Position], dtype: torch.dtype) -> float:
    """The largest difference between logits and the recorded ones. Raises ExportError when it is
    more than another machine's kernels make of weights in `dtype`."""
    tolerance = max(TOLERANCE, 4 * torch.finfo(dtype).eps)
    tokens = torch.tensor([[token for token, _ in one.top] for one in recorded])
    if len(tokens) != logits.shape[1] or int(tokens.max()) >= logits.shape[2]:
        raise ExportError(f"the exported model gives logits of shape {tuple(logits.shape)}")
    known = torch.tensor([[logit for _, logit in one.top] for one in recorded])
    norms = torch.tensor([one.norm for one in recorded]).clamp(min=1e-9)
    compare(logits[0].norm(dim=-1) / norms, torch.ones_like(norms), tolerance)
    return compare(logits[0].gather(1, tokens), known, tolerance)


def verify(folder: Path, report: Callable[[str], object], *, trust_remote_code: bool) -> None:
    """Read every byte, then load the model and run it, unless it is an adapter alone; `report`
    takes a line for each step.

    Raises ExportError for everything that differs from the finished export.
    """
    found, proof = prove_bytes(folder, strict=True)
    report(f"{len(found.others)} files beside the weights are as they were written")
    tensors = sum(len(entry.tensors) for entry in found.weights.values())
    report(f"{tensors} tensors in {len(found.weights)} file(s) are as they were written")
    if (folder / CONFIG).is_file():
        report("an adapter is not run again: that needs its base model")
        return
    with loaded(folder, trust_remote_code=trust_remote_code) as model:
        difference = _run_again(model, proof)
    report(f"the model computes what it did (largest difference {difference:.2g})")


def _run_again(model: nn.Module, proof: Proof) -> float:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return recognise(logits(model, torch.tensor([proof.prompt])), proof.logits, coarsest)


def prove_bytes(folder: Path, *, strict: bool) -> tuple[Manifest, Proof]:
    """The manifest and proof of a folder whose files are all as they were written. Unless `strict`,
    there may be more files, and another model card. Raises ExportError."""
    found = manifest.load(folder)
    if found is None or found.proof is None:
        raise ExportError(f"{folder}: no finished export: it has no {manifest.NAME} with a proof")
    if found.block != BLOCK:
        raise ExportError(f"{folder}: written by another version, with other checksums")
    added = sorted(names_in(folder) - set(found.files))
    if strict and added:
        raise ExportError(f"{folder}: {added[0]} is not of this export")
    for name, expected in found.others.items():
        if name == CARD and not strict:
            continue
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name}: missing")
        if xxh3_64_hexdigest((folder / name).read_bytes()) != expected:
            raise ExportError(f"{folder / name}: is not as it was written")
    parts = [_shard(name, entry) for name, entry in found.weights.items()]
    sums = {name: entry.sums for name, entry in found.weights.items()}
    prove_files(folder, parts, sums, DistContext(device=torch.device("cpu")))
    return found, found.proof


def _shard(name: str, entry: WeightFile) -> Shard:
    for code, _ in entry.tensors.values():
        if code not in DTYPES:
            raise ExportError(f"{name}: has tensors of the unknown dtype {code}")
    specs = {n: TensorSpec(shape, DTYPES[code]) for n, (code, shape) in entry.tensors.items()}
    return Shard(file=name, tensors=specs)
