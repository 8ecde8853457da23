"""The numbers of a training beside those of the plain loop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


def assert_same_numbers(
    result: Any, expected: Any, file: Path | str, held: Iterable[str] | None = None
) -> None:
    """Compare the losses, norms and weights that `train_case` returned and wrote with those of
    `reference`; `held` names the weights to compare, which are all by default."""
    losses, norms, weights, heldout = expected
    steps = [record for record in result["records"] if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, len(losses) + 1))
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-4)
    assert result["metrics"]["eval_loss"] == pytest.approx(heldout, rel=1e-5)
    final = load_file(file)
    wanted = set(weights if held is None else held)
    assert wanted
    assert wanted <= set(final)
    for name in wanted:
        torch.testing.assert_close(final[name], weights[name], rtol=0, atol=1e-4, msg=name)
