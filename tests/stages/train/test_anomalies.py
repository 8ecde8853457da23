"""Anomalous steps: their detection, and the training after them, under every strategy."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.contracts.metrics import OWN
from pipeline.contracts.optimizer import LossScaling
from pipeline.contracts.training import Progress
from pipeline.testing import plan_view, problems
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.train.anomalies import exclude, is_spike
from stages.train.causal_lm import TrainCausalLm
from stages.train.settings import Anomalies
from tests.support.poison import HIGH, NAN, Poisoned, train, train_both
from tests.support.processes import RankFailed, run_ranks
from tests.support.state import Setting
from tests.support.strategies import having
from tests.support.tier import spread
from tests.support.zero import has_libaio

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

STRATEGIES = [*having("basic"), "zero2 offload", "zero3 offload"]
SKIP = Anomalies(non_finite="skip", spike="skip", spike_window=2, spike_factor=5.0)
BACK = Anomalies(non_finite="rollback", spike="rollback", spike_window=2, spike_factor=5.0)
FP16 = LossScaling(initial_scale=8.0, growth_interval=2)


def steps(told: dict[str, Any]) -> list[list[Any]]:
    names = ("step", "loss", "grad_norm", "lr", "loss_scale")
    return [[line[name] for name in names] for line in told["lines"] if "loss" in line]


def anomalies(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in told["lines"] if "anomaly" in line]


@pytest.mark.parametrize(
    ("wrap", "compute"),
    spread([*((wrap, "fp32") for wrap in STRATEGIES), ("zero1", "bf16")], 4),
)
def test_skipped_batches_might_as_well_not_have_been(
    wrap: str, compute: str, tmp_path: Path
) -> None:
    """The two are equal to the bit: weights, moments, counts of updates, the schedule, every
    reported number."""
    setting = Setting(wrap=wrap, compute=compute)
    poison = {1: NAN, 2: NAN, 5: HIGH}
    left = Poisoned(setting=setting, batches=range(8), poison=poison, steps=5, anomalies=SKIP)
    right = Poisoned(setting=setting, batches=[0, 3, 4, 6, 7], steps=5, anomalies=Anomalies())
    for skipped, without in run_ranks(train_both, 2, str(tmp_path), left, right):
        assert skipped["state"] == without["state"]
        assert skipped["progress"]["left_out"] == [[4, 12], [20, 24]]
        assert without["progress"]["left_out"] == []
        assert (skipped["progress"]["samples"], without["progress"]["samples"]) == (32, 20)
        assert steps(skipped) == steps(without)
    told = [
        (line["step"], line["anomaly"], line["action"], line["samples_from"], line["samples_to"])
        for line in anomalies(skipped)
    ]
    assert told == [
        (2, "non-finite gradient", "skip", 4, 8),
        (2, "non-finite gradient", "skip", 8, 12),
        (4, "loss spike", "skip", 20, 24),
    ]
    assert [line["grad_norm"] for line in anomalies(skipped)[:2]] == [None, None]
    assert anomalies(skipped)[2]["anomalous_loss"] > 20


@pytest.mark.full
@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_a_batch_is_skipped_with_the_masters_on_disk(tmp_path: Path) -> None:
    """The model is large because 1 MiB is the smallest block that is swapped."""
    big = {"vocab_size": 6001, "hidden_size": 96, "num_attention_heads": 4}
    setting = Setting(wrap="zero3 nvme", nvme=str(tmp_path / "nvme"), model=big)
    left = Poisoned(
        setting=setting, batches=range(5), poison={1: NAN, 3: HIGH}, steps=3,
        anomalies=Anomalies(non_finite="skip", spike="skip", spike_window=2, spike_factor=3.0),
    )  # fmt: skip
    right = Poisoned(setting=setting, batches=[0, 2, 4], steps=3, anomalies=Anomalies())
    skipped, without = run_ranks(train_both, 2, str(tmp_path), left, right)[0]
    assert skipped["state"] == without["state"]
    assert skipped["progress"]["left_out"] == [[4, 8], [12, 16]]


@pytest.mark.parametrize("wrap", ["ddp", "zero2", "zero3"])
def test_a_skipped_spike_counts_for_the_loss_scale_as_any_step_without_overflow(
    wrap: str, tmp_path: Path
) -> None:
    setting = Setting(wrap=wrap, compute="fp16", loss_scaling=FP16)
    case = Poisoned(
        setting=setting, batches=range(6), poison={3: HIGH}, steps=5, anomalies=SKIP
    )  # fmt: skip
    told = run_ranks(train, 2, str(tmp_path), case)[0]
    scales = [line["loss_scale"] for line in told["lines"] if "loss" in line]
    # doubled after two steps, and after the spike too
    assert scales == [8.0, 8.0, 16.0, 32.0, 32.0]
    assert told["progress"]["left_out"] == [[12, 16]]


def test_an_overflow_is_no_part_of_the_window_of_losses(tmp_path: Path) -> None:
    scaling = LossScaling(initial_scale=2.0**24, growth_interval=100)
    case = Poisoned(
        setting=Setting(wrap="ddp", compute="fp16", loss_scaling=scaling), batches=range(12),
        steps=12, anomalies=Anomalies(spike="stop", spike_window=50, spike_factor=9.0),
    )  # fmt: skip
    told = run_ranks(train, 1, str(tmp_path), case)[0]
    lines = [line for line in told["lines"] if "loss" in line]
    updates = [line["loss"] for line in lines if line["applied"]]
    assert 0 < len(updates) < 12
    assert told["progress"]["recent_losses"] == pytest.approx(updates)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp full", "zero3"])
def test_a_rollback_goes_on_behind_the_anomalous_batch(wrap: str, tmp_path: Path) -> None:
    """Checkpoints are at steps 0, 2, 4: batch 1 sends the training back to the start, batch 6 to
    step 2."""
    setting = Setting(wrap=wrap)
    left = Poisoned(
        setting=setting, batches=range(9), poison={1: NAN, 5: HIGH}, steps=5, anomalies=BACK,
        every=2,
    )  # fmt: skip
    right = Poisoned(setting=setting, batches=[2, 3, 6, 7, 8], steps=5, anomalies=Anomalies())
    back, without = run_ranks(train_both, 2, str(tmp_path), left, right)[1]
    assert back["state"] == without["state"]
    assert steps(back) == steps(without)
    assert back["progress"]["left_out"] == [[0, 8], [16, 24]]
    assert back["progress"]["rollbacks"] == 2
    told = [
        (line["step"], line["anomalous_step"], line["samples_from"], line["samples_to"])
        for line in anomalies(back)
    ]
    assert told == [(1, 2, 0, 8), (3, 4, 16, 24)]
    assert {name for line in back["lines"] for name in line} <= OWN


def test_an_epoch_whose_last_batch_is_skipped_ends_with_an_evaluation(tmp_path: Path) -> None:
    setting = Setting(wrap="ddp")
    left = Poisoned(setting=setting, batches=range(4), poison={3: NAN}, anomalies=SKIP)
    right = Poisoned(setting=setting, batches=range(3), anomalies=SKIP)
    skipped, without = run_ranks(train_both, 1, str(tmp_path), left, right)[0]
    assert skipped["progress"]["step"] == without["progress"]["step"] == 3
    assert skipped["progress"]["samples"] == 16
    assert evaluated_at(skipped) == [3]
    assert "eval_loss" in skipped["progress"]["metrics"]


def evaluated_at(told: dict[str, Any]) -> list[int]:
    return [line["step"] for line in told["lines"] if "eval_loss" in line]


def test_the_last_checkpoint_knows_of_the_batch_that_was_left_out_behind_it(
    tmp_path: Path,
) -> None:
    """Step 4 is saved, and the fifth batch, the last one, is skipped."""
    case = Poisoned(
        setting=Setting(wrap="ddp"), batches=range(5), poison={4: NAN}, anomalies=SKIP, every=4,
        fields={"result": "best"},
    )  # fmt: skip
    told = run_ranks(train, 2, str(tmp_path), case)[0]
    assert evaluated_at(told) == [4]
    step = tmp_path / "checkpoints" / "step-00000004"
    assert told["checkpoint"] == str(step)
    saved = Manifest.load((step / MANIFEST).read_bytes(), "here")
    assert saved.progress == told["progress"]
    assert saved.progress["left_out"] == [[16, 20]]
    assert saved.progress["metrics"]["eval_loss"] == saved.progress["best"]["eval_loss"]
    again = run_ranks(train, 2, str(tmp_path), case)[0]
    assert (again["progress"], evaluated_at(again)) == (told["progress"], [4])
    # A kill before that was recorded has the same result.
    unaware = Progress.from_record(saved.progress).as_new_run()
    unaware.samples, unaware.metrics = 16, {"loss": saved.progress["metrics"]["loss"]}
    (step / MANIFEST).write_bytes(saved.model_copy(update={"progress": vars(unaware)}).dump())
    again = run_ranks(train, 2, str(tmp_path), case)[0]
    assert again["progress"] == told["progress"]
    assert again["checkpoint"] == told["checkpoint"]


@pytest.mark.parametrize("eval_every", [4, 10])
def test_a_rollback_to_the_end_of_training_ends_with_an_evaluation(
    eval_every: int, tmp_path: Path
) -> None:
    """The last batch is anomalous, and the newest checkpoint is at step 3."""
    case = Poisoned(
        setting=Setting(wrap="ddp"), batches=range(6), poison={5: NAN}, anomalies=BACK, every=3,
        fields={"result": "best", "eval_every": eval_every},
    )  # fmt: skip
    told = run_ranks(train, 1, str(tmp_path), case)[0]
    assert evaluated_at(told) == [3]  # records of undone steps are gone
    assert told["checkpoint"].endswith("step-00000003")
    assert told["progress"]["best"]["step"] == 3
    assert told["progress"]["left_out"] == [[12, 24]]
    assert told["progress"]["rollbacks"] == 1


@pytest.mark.parametrize(
    ("fields", "poison", "message"),
    [
        ({}, {2: NAN}, r"step 3: the gradient norm is nan \(samples 8 to 11 of the order\)"),
        ({"spike": "stop", "spike_window": 2, "spike_factor": 5.0}, {2: HIGH},
         r"step 3: the loss is \d+\.\d{4}, a spike over the mean 4\.\d{4} "
         r"\(samples 8 to 11 of the order\)"),
        ({"non_finite": "skip", "max_skips": 2}, {1: NAN, 3: NAN, 4: NAN, 5: NAN},
         r"step 3: .*, after 2 steps in a row were skipped \(max_skips\)"),
        ({"non_finite": "rollback", "max_rollbacks": 1}, {1: NAN, 3: NAN},
         r"step 2: .*, after 1 rollbacks \(max_rollbacks\)"),
    ],
)  # fmt: skip
def test_a_run_stops_and_says_why(
    fields: Any, poison: dict[int, int], message: str, tmp_path: Path
) -> None:
    case = Poisoned(
        setting=Setting(wrap="ddp"), batches=range(8), poison=poison, steps=6,
        anomalies=Anomalies(**fields),
    )  # fmt: skip
    with pytest.raises(RankFailed, match=f"StageError: {message}"):
        run_ranks(train, 1, str(tmp_path), case)
    saved = [path.name for path in tmp_path.glob("checkpoints/*")]
    assert saved == ["step-00000000"] * case.anomalies.rolls_back


LOSSES = st.lists(st.floats(0.01, 100), min_size=2, max_size=12)


@given(recent=LOSSES, window=st.integers(2, 6), near=st.floats(0.9, 1.1))
def test_a_spike_is_what_the_fields_say(recent: list[float], window: int, near: float) -> None:
    mean = statistics.fmean(recent[-window:])
    loss = near * 1.5 * mean
    policy = Anomalies(spike="skip", spike_window=window, spike_factor=1.5)
    assert is_spike(loss, recent, policy) == (len(recent) >= window and loss > 1.5 * mean)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8))
def test_positions_left_out_are_told_once_in_order(spans: list[tuple[int, int]]) -> None:
    progress = Progress()
    for start, length in spans:
        exclude(progress, start, start + length)
    told = progress.left_out
    wanted = {position for start, length in spans for position in range(start, start + length)}
    assert {p for low, high in told for p in range(low, high)} == wanted
    assert all(left[1] < right[0] for left, right in itertools.pairwise(told))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"spike": "skip"}, []),
        ({"spike": "skip", "spike_factor": 0.5},
         ["anomalies.spike_factor: must be more than 1.0, not `0.5`"]),
        ({"non_finite": "skip", "spike": "stop", "spike_factor": 4.0}, []),
        ({"non_finite": "rollback"},
         ["anomalies.non_finite: rollback goes back to the newest checkpoint, and none is saved "
          "before the end"]),
    ],
)  # fmt: skip
def test_mistakes(fields: Any, found: list[str]) -> None:
    view = plan_view({"checkpoint": ShardedCheckpoint()})
    slot = {"global_batch_size": 8, "steps": 10, "anomalies": fields}
    told = problems(TrainCausalLm, slot, plan=view)
    assert [f"{problem.key}: {problem.message}" for problem in told] == found
    assert not told or "every" not in told[0].message or told[0].hint.startswith("set every")
