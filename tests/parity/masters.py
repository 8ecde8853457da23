"""A plain loop that strategies must match bit by bit, and each rank's comparison with it.

All 2 or 4 ranks train on the same tokens: the average of their gradients is each rank's gradient,
to the bit, and nothing depends on the order of a sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.contracts.engine import WEIGHT, Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.precision import torch_dtype
from pipeline.distributed.process_group import DistContext
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import SEED, tiny_source
from tests.support.batches import accumulated, micro_batch
from tests.support.runs import context
from tests.support.strategies import Strategy

STEPS, LR, DECAY = 4, 1e-3, 0.1
PLAIN = AdamW(lr=LR, weight_decay=DECAY, decay_all=True, kernel="single", max_grad_norm=None)
ROUNDED = AdamW(
    lr=LR, weight_decay=DECAY, decay_all=True, kernel="single", max_grad_norm=None,
    stochastic_rounding=True,
)  # fmt: skip
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
