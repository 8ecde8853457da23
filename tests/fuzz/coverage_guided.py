"""Fuzz a reader by its coverage, for as long as you like.

pip install atheris
python -m tests.fuzz.coverage_guided recipe|manifest|safetensors|journal|deepspeed|dcp [libFuzzer's
options, such as -max_total_time=600]

It starts from valid files, and stops at the first input at which a reader raises anything but an
error for people, takes long or much memory, or opens a file elsewhere. libFuzzer keeps that input.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pipeline", "stages"]):
    import torch
    from safetensors.torch import save_file

    from pipeline.checkpoint.manifest import Manifest, _framed
    from pipeline.execution.journal import Journal
    from pipeline.recipe import read_recipe
    from stages.formats.dcp_compat import read_metadata
    from stages.formats.stored import load
    from stages.weights.files import SafetensorsReader
from tests.fuzz.hostile import bounded

ROOT = Path(__file__).parents[2]
Target = tuple[str, Callable[[Path], object], Callable[[Path], object]]


def _safetensors(file: Path) -> None:
    reader = SafetensorsReader([file])
    for name in reader.names():
        for _ in reader.chunks(name, 0, reader.spec(name).numel):
            pass
    reader.close()


def _journal(file: Path) -> None:
    Journal(file).write("run started", procs=2)


TARGETS: dict[str, Target] = {
    "recipe": (
        "recipe.yaml", read_recipe,
        lambda file: file.write_bytes((ROOT / "recipes" / "quickstart.yaml").read_bytes()),
    ),
    "manifest": (
        "manifest.json", lambda file: Manifest.load(_framed(file.read_bytes()), "here"),
        lambda file: file.write_bytes(b', "step": 1, "tensors": [], "runs": [], "files": []'),
    ),
    "safetensors": (
        "a.safetensors", _safetensors, lambda file: save_file({"a": torch.ones(3)}, file),
    ),
    "journal": ("journal.jsonl", lambda file: Journal(file).state().finished, _journal),
    "deepspeed": ("a.pt", load, lambda file: torch.save({"a": torch.ones(3), "b": 1}, file)),
    "dcp": (
        ".metadata", lambda file: read_metadata(file.parent), lambda file: file.write_bytes(b"."),
    ),
}  # fmt: skip
"""Name of a file, its reader, and what writes a valid one."""


def main() -> None:
    """Fuzz the target of the first argument."""
    name, read, write = TARGETS[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory() as scratch:
        file, corpus = Path(scratch, name), Path(scratch, "corpus")
        corpus.mkdir()
        write(corpus / "valid")

        def once(content: bytes) -> None:
            file.write_bytes(content)
            with bounded(Path(scratch), may_leave=read is read_recipe), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(file)

        atheris.Setup([*sys.argv, str(corpus)], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
