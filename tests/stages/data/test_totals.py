"""The number of targets of a whole batch is known without reading sample by sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.contracts.data import Samples
from pipeline.contracts.stage import Context
from stages.data.chat import ChatData
from stages.data.samples import Mixture
from stages.data.text import TextData
from tests.stages.data.fakes import FakeSource

WORDS = ["abcd", "efg", "hi", "jklmnop", "q", "rstuv", "wx"]
INDICES = np.array([1, 0, 1, 2, 2, 2])

Make = Callable[[Context, FakeSource, Path], Samples | None]


def chat(ctx: Context, source: FakeSource, folder: Path, *, packing: bool = False) -> Samples:
    file = folder / "a.jsonl"
    rows = [{"prompt": word, "completion": word[: 1 + n]} for n, word in enumerate(WORDS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = ChatData(
        files=str(file), sequence_length=30, packing=packing, template=False, cache=str(folder)
    )
    return stage.run(ctx, source).train


def text(ctx: Context, source: FakeSource, folder: Path, *, heldout: bool = False) -> Samples:
    file = folder / "d.jsonl"
    file.write_text("".join(json.dumps({"text": word}) + "\n" for word in WORDS))
    stage = TextData(
        files=str(file), sequence_length=4, documents_apart=True, cache=str(folder),
        heldout_fraction=0.6 if heldout else 0.0,
    )  # fmt: skip
    data = stage.run(ctx, source)
    samples = data.heldout if heldout else data.train
    assert samples is not None
    return samples


MAKERS: dict[str, Make] = {
    "rows": chat,
    "packed rows": lambda *given: chat(*given, packing=True),
    "blocks": text,
    "blocks behind others": lambda *given: text(*given, heldout=True),
    "a mixture": lambda *given: Mixture([chat(*given), text(*given)], [9, 20]),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_at_once(kind: str, ctx: Context, source: FakeSource, tmp_path: Path,
                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    samples = MAKERS[kind](ctx, source, tmp_path)
    assert samples is not None
    indices = np.append(INDICES % len(samples), len(samples) - 1)
    expected = sum(samples.targets(index) for index in indices.tolist())
    assert expected > 0
    for place in {type(samples), *map(type, getattr(samples, "_parts", ()))}:
        monkeypatch.setattr(place, "targets", None)
    assert samples.total_targets(indices) == expected
    assert samples.total_targets(indices[:0]) == 0
    assert samples.total_rows(indices) == sum(samples[n].documents for n in indices.tolist())
    assert samples.total_rows(indices[:0]) == 0
    for wrong in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"of {len(samples)}"):
            samples.total_targets(np.append(indices, wrong))
