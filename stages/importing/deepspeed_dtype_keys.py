"""The keys of DeepSpeed's blocks for narrow floats."""

from __future__ import annotations

from typing import Any

from stages.importing import read
from stages.importing.rules import Auto, Rule, Table, Verdict, WrongValueError, covered, never, says

SKIPPED = "an overflow always skips the step and halves the scale"


def _enabled(dtype: str) -> Rule:
    def rule(value: Any) -> Verdict:
        if value == "auto":
            return Verdict(outcome="translated", fact="compute", value=Auto(default="fp32"))
        if value is None or not read.truth(value):
            return Verdict(outcome="default", why="is off")
        return Verdict(outcome="translated", fact="compute", value=dtype)

    return rule


def _dynamic(value: Any) -> Verdict:
    if read.number(value) == 0:
        return Verdict(outcome="default", why="the loss scale is dynamic")
    why = "the loss scale is dynamic"
    return Verdict(outcome="refused", why=why, hint="set loss_scale: 0, and initial_scale_power")


def _scale(power: Any) -> float:
    found = read.whole(power)
    if not 0 <= found <= 32:
        raise WrongValueError(f"2 to the power of {power!r} is no loss scale to start from")
    return float(2**found)


FP16: Table = {
    "enabled": _enabled("fp16"),
    "loss_scale": _dynamic,
    "initial_scale_power": says("fp16.initial", _scale),
    "loss_scale_window": says("fp16.interval", read.positive),
    "hysteresis": covered(SKIPPED),
    "consecutive_hysteresis": covered(SKIPPED),
    "min_loss_scale": covered(SKIPPED),
    "auto_cast": covered("inputs are token ids"),
    "fp16_master_weights_and_grads": never("masters below fp32 lose small updates"),
    "fp16_optimizer_states": never("optimizer state has the masters' dtype"),
}
BF16: Table = {
    "enabled": _enabled("bf16"),
    "immediate_grad_update": covered("gradients are summed over the whole step"),
    "check_grad_overflow": covered("a gradient that is not finite ends the run"),
    "bf16_master_weights_and_grads": says(
        "master", lambda value: "bf16" if read.truth(value) else "fp32"
    ),
    "bf16_optimizer_states": never("optimizer state has the masters' dtype"),
}
