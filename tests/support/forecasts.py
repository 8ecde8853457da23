"""Forecasts of declared models, without recipe files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.forecast.ledger import Peak
from pipeline.forecast.placement import Placement
from pipeline.forecast.result import Step
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.site import Site

from stages.data.text import TextData
from stages.model.hf import HfModel
from stages.model.known import known_config
from stages.model.options import ActivationCheckpointing
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 8000,
}  # fmt: skip
GIB = 1 << 30


def declared(config: Mapping[str, Any] | str, *, again: bool = False, **fields: Any) -> ModelShape:
    """The shape of a config, or of a well-known model."""
    found = known_config(config) if isinstance(config, str) else config
    assert found is not None
    recomputed = ActivationCheckpointing() if again else None
    return HfModel(config=found, activation_checkpointing=recomputed, **fields).forecast(
        Site(ranks=1, local_ranks=1, device="cpu")
    )


class Told:
    """A step of a wrap stage on a model."""

    def __init__(
        self,
        wrap: Any,
        model: ModelShape,
        *,
        ranks: int,
        local: int = 8,
        micro: int = 1,
        length: int = 4096,
        accumulation: int = 1,
        chunk: int | None = None,
        compute: str = "bf16",
        device: str = "cuda",
        kernel: str = "fused",
        master: str = "fp32",
    ) -> None:
        self.site = Site(ranks=ranks, local_ranks=min(local, ranks), device=device)
        precision = PrecisionPolicy(compute=compute, master=master).forecast(self.site)  # type: ignore[arg-type]
        optimizer = AdamW(kernel=kernel).forecast(self.site, precision)  # type: ignore[arg-type]
        self.placement: Placement = wrap.forecast(self.site, model, precision, optimizer)
        train = TrainCausalLm(
            steps=2,
            global_batch_size=ranks * micro * accumulation,
            micro_batch_size=micro,
            loss_chunk_size=chunk,
        )
        data = TextData(files="x.txt", sequence_length=length).forecast(self.site)
        self.step: Step = train.forecast(
            self.site, model, data, precision, optimizer, self.placement
        )

    def peaks(self, *places: Any) -> dict[str, Peak]:
        """By phase."""
        return self.site.ledger.peaks(*(places or ("device",)))

    @property
    def peak(self) -> int:
        """Of all phases, on the device."""
        return max(peak.bytes for peak in self.peaks().values())
