"""Masters in bf16 and fp32, whole, sharded and offloaded, against a plain loop bit by bit.

All 2 or 4 ranks train on the same tokens: the average of their gradients is each rank's gradient,
to the bit, and nothing depends on the order of a sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.contracts.engine import WEIGHT, Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import torch_dtype
from pipeline.distributed.process_group import DistContext
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import SEED, tiny_source
from tests.support.batches import accumulated, micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.strategies import Strategy

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

STEPS, LR, DECAY = 4, 1e-3, 0.1
PLAIN = AdamW(lr=LR, weight_decay=DECAY, decay_all=True, kernel="single", max_grad_norm=None)
ROUNDED = replace(PLAIN, stochastic_rounding=True)
TOKENS = torch.arange(40).reshape(2, 20)

Kept = dict[str, dict[str, torch.Tensor]]
"""Parameter -> kind of state -> flat values."""


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())


def plain_loop(source: ModelSource, master: torch.dtype, steps: int) -> Kept:
    """Run torch's AdamW on whole parameters in `master`; forward and backward use them cast to
    bf16."""
    model, reader = source.build(), source.weights()
    parameters = {name: reader.read(name).to(master) for name, _ in model.named_parameters()}
    parameters = {name: torch.nn.Parameter(weight) for name, weight in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, weight_decay=DECAY, foreach=False)
    for _ in range(steps):
        cast = {name: weight.to(torch.bfloat16) for name, weight in parameters.items()}
        logits = torch.func.functional_call(model, cast, kwargs={"input_ids": TOKENS}).logits
        loss_of(logits).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: {
            WEIGHT: weight.detach().flatten(),
            **{kind: optimizer.state[weight][kind].flatten() for kind in ("exp_avg", "exp_avg_sq")},
        }
        for name, weight in parameters.items()
    }


def train(ctx: Any, case: Mapping[str, Any], rule: AdamW, steps: int) -> Engine:
    """Train the same under the strategy of the case."""
    precision = PrecisionPolicy(compute="bf16", master=case["master"], reduce="fp32").run(ctx)
    wrap = Strategy(use=case["wrap"], fields=case["fields"]).stage()
    engine: Engine = wrap.run(ctx, tiny_source(ctx), precision, rule.run(ctx))
    for _ in range(steps):
        # Every rank has the same tokens.
        labels = F.pad(TOKENS[:, 1:], (0, 1), value=-100)
        batch = micro_batch(TOKENS, labels)
        accumulated(engine, [batch], engine.data_axis.count * TOKENS[:, 1:].numel())
        engine.step(lr_scales=[1.0])
    return engine


def compare(dist: DistContext, folder: str, cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each case: the elements of this rank, the number whose bits differ from the plain
    loop's, and the largest difference."""
    ctx = context(dist, folder, SEED)
    results = {}
    for name, case in cases.items():
        expected = plain_loop(tiny_source(ctx), torch_dtype(case["master"]), STEPS)
        engine = train(ctx, case, PLAIN, STEPS)
        count = different = 0
        furthest = 0.0
        for fragment in engine.fragments():
            for kind, values in fragment.state.items():
                whole = expected[fragment.name][kind]
                wanted = whole[fragment.start : fragment.start + values.numel()]
                found = values.flatten().to(wanted.dtype)
                count += values.numel()
                different += int((found != wanted).sum())
                furthest = max(furthest, float((found - wanted).abs().max()))
        engine.close()
        results[name] = {"elements": count, "different": different, "furthest": furthest}
    return results


def round_once(dist: DistContext, folder: str, cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each case, after one update with stochastic rounding: how the weights relate to
    the fp32 values that they were rounded from, which the plain loop gives, and a digest of the
    bits."""
    ctx = context(dist, folder, SEED)
    results = {}
    for name, case in cases.items():
        exact = exact_update(tiny_source(ctx))
        engine = train(ctx, case, ROUNDED, 1)
        digest, ups, fractions = hashlib.sha256(), [], []
        for fragment in engine.fragments():
            weights = fragment.state[WEIGHT].flatten().float()
            whole = exact[fragment.name]
            wanted = whole[fragment.start : fragment.start + weights.numel()]
            lower, upper = neighbours(wanted)
            digest.update(f"{fragment.name} {fragment.start}".encode())
            digest.update(weights.numpy().tobytes())
            ups.append((weights - lower) / (upper - lower))
            fractions.append((wanted - lower) / (upper - lower))
        engine.close()
        up, fraction = torch.cat(ups), torch.cat(fractions)
        low = (fraction > 0.1) & (fraction < 0.4)
        results[name] = {
            "elements": up.numel(),
            "neither": int(((up != 0) & (up != 1)).sum()),
            "bias": float((up - fraction).mean()),
            "up": float(up[low].mean()),
            "fraction": float(fraction[low].mean()),
            "low": int(low.sum()),
            "digest": digest.hexdigest(),
        }
    return results


def exact_update(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return bf16 weights after one update in fp32, before rounding."""
    model, reader = source.build(), source.weights()
    weights = {name: reader.read(name).bfloat16() for name, _ in model.named_parameters()}
    halves = {name: weight.requires_grad_() for name, weight in weights.items()}
    logits = torch.func.functional_call(model, halves, kwargs={"input_ids": TOKENS}).logits
    loss_of(logits).backward()
    masters = {name: weight.detach().float() for name, weight in halves.items()}
    for name, master in masters.items():
        master.grad = halves[name].grad.float()  # type: ignore[union-attr]
    torch.optim.AdamW(masters.values(), lr=LR, weight_decay=DECAY, foreach=False).step()
    return {name: master.flatten() for name, master in masters.items()}


def neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two bf16 numbers around each fp32 value: towards zero, and away from it."""
    bits = values.view(torch.int32) & -(1 << 16)
    return bits.view(torch.float32), (bits + (1 << 16)).view(torch.float32)


def case(wrap: str, master: str, **fields: Any) -> dict[str, Any]:
    return {"wrap": wrap, "master": master, "fields": fields}


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
HYBRID = {"sharding": "hybrid_shard", "shard_size": 2}
MASTERS: dict[int, dict[str, Any]] = {
    2: {
        "ddp bf16": case("wrap.ddp", "bf16"),
        "fsdp bf16": case("wrap.fsdp", "bf16"),
        "fsdp offloaded bf16": case("wrap.fsdp", "bf16", cpu_offload=True),
        "zero2 bf16": case("wrap.zero", "bf16", stage=2),
        "zero3 bf16": case("wrap.zero", "bf16", stage=3),
        "zero1 fp32": case("wrap.zero", "fp32", stage=1),
        "zero1 offloaded fp32": case("wrap.zero", "fp32", stage=1, **OFFLOADED),
        "zero3 offloaded fp32": case("wrap.zero", "fp32", stage=3, **OFFLOADED),
    },
    4: {
        "hybrid bf16": case("wrap.fsdp", "bf16", **HYBRID),
        "hybrid fp32": case("wrap.fsdp", "fp32", **HYBRID),
        "hybrid offloaded fp32": case("wrap.fsdp", "fp32", cpu_offload=True, **HYBRID),
        "zero1 fp32": case("wrap.zero", "fp32", stage=1),
    },
}
ROUNDINGS: dict[int, dict[str, Any]] = {
    2: {
        "ddp": case("wrap.ddp", "bf16"),
        "ddp again": case("wrap.ddp", "bf16"),
        "fsdp": case("wrap.fsdp", "bf16"),
        "zero3": case("wrap.zero", "bf16", stage=3),
    },
    4: {"hybrid": case("wrap.fsdp", "bf16", **HYBRID)},
}
CLOSE = 1e-6
"""Largest difference accepted: DeepSpeed's CPU Adam computes in another order. A step moves a
weight by 1e-3."""
CASES = [(ranks, name) for ranks, cases in MASTERS.items() for name in cases]
AT_RANDOM = [(ranks, name) for ranks, cases in ROUNDINGS.items() for name in cases]


def both(dist: DistContext, folder: str, ranks: int) -> list[Any]:
    """Run all comparisons on `ranks` ranks in one process group."""
    return [compare(dist, folder, MASTERS[ranks]), round_once(dist, folder, ROUNDINGS[ranks])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return the results of each rank by number of ranks."""
    folder = str(tmp_path_factory.mktemp("masters"))
    return {ranks: run_ranks(both, ranks, folder, ranks) for ranks in MASTERS}


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_weights_and_moments_are_those_of_the_plain_loop(ranks: int, name: str, found: Any) -> None:
    for masters, _ in found[ranks]:
        result = masters[name]
        assert result["elements"] > 0
        if "offloaded fp32" in name and "zero" in name:
            assert result["furthest"] < CLOSE
        else:
            assert result["different"] == 0, result


@pytest.mark.parametrize(("ranks", "name"), AT_RANDOM)
def test_weights_are_rounded_to_a_neighbour_with_the_right_mean(
    ranks: int, name: str, found: Any
) -> None:
    for _, rounded in found[ranks]:
        result = rounded[name]
        deviation = 0.5 / math.sqrt(result["elements"])
        # The plain loop's last bit of fp32 may differ, so a value that bf16 represents to within it
        # may be on either side.
        assert result["neither"] <= result["elements"] / 1000
        assert abs(result["bias"]) < 4 * deviation
        # Rounding to the nearest would round none of these up.
        assert abs(result["up"] - result["fraction"]) < 4 * 0.5 / math.sqrt(result["low"])


def test_replicas_and_repetitions_are_rounded_alike(found: Any) -> None:
    digests = [{name: one["digest"] for name, one in rounded.items()} for _, rounded in found[2]]
    assert digests[0]["ddp"] == digests[1]["ddp"] == digests[0]["ddp again"]
    assert digests[0]["fsdp"] != digests[1]["fsdp"]
    shards = [rounded["hybrid"]["digest"] for _, rounded in found[4]]
    assert (shards[0], shards[1]) == (shards[2], shards[3])
    assert shards[0] != shards[1]
