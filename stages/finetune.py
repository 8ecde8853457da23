"""The recipe that `pipe advise` and `pipe init` start from: fine-tuning of a causal language
model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.finetune_choices import DataSurvey, choose
from stages.model.compat import suited_attention
from stages.model.hf import HfModel

if TYPE_CHECKING:
    from pipeline import Context
    from pipeline.planning import AdviceRequest

MOST_TOKENS = {True: 8192, False: 1024}
"""Tokens of a forward pass, if the request does not say, on one GPU: enough to keep it busy; or on
CPUs, which a single short sample keeps waiting for memory."""
FEW = 2_000_000_000
"""Parameters up to which all weights are trained, unless the request says."""
SMALL = 1_000_000_000
"""Parameters below which all weights take a higher learning rate: SmolLM2's authors fine-tune their
135M and 360M with 1e-3 on half a million samples (alignment-handbook, recipes/smollm2)."""
LARGE = 30_000_000_000
"""Parameters from which LoRA takes half the learning rate (Dettmers et al. 2023, table 9)."""
RANK, ALPHA = 16, 32
ANSWERS = 20_000_000_000
"""Parameters up to which an answer of a few dozen tokens costs little next to the training."""
ROOM = 1024
"""Positions of a model that has room for a short question and its answer."""


class Finetune:
    """Slots of the recipe, by the request, or also by what its data is like."""

    def __call__(self, request: AdviceRequest) -> Mapping[str, Mapping[str, Any]]:
        """Return the slots, with an empty one for the strategy."""
        found, batch = request.survey, request.global_batch
        chosen = choose(found, sequence=request.sequence, batch=batch, ranks=request.ranks)
        most = request.micro_batch or max(MOST_TOKENS[request.on_gpus] // chosen.sequence, 1)
        # The attention that the architecture has, where it is not the default.
        kind = (HfModel(**request.model).config_at_hand() or {}).get("model_type")
        best = suited_attention(str(kind), "cuda" if request.on_gpus else "cpu")
        model: dict[str, Any] = {"use": "model.hf"}
        if best != HfModel.attention:
            model["attention"] = best
        model |= {name: request.named(value) for name, value in request.model.items()}
        if found and found.template:
            model["chat_template"] = found.template
        train: dict[str, Any] = {
            "use": "train.causal_lm",
            "epochs": chosen.epochs,
            "global_batch_size": chosen.batch,
            "micro_batch_size": min(most, -(-chosen.batch // request.ranks)),
        }
        if chosen.held:
            train |= {"eval_every": chosen.eval_every, "eval_first": True}
        small = found is not None and (found.parameters or ANSWERS) < ANSWERS
        if found and found.prompt and small and (found.positions or ROOM) >= ROOM:
            # A question of the data, answered before and after training.
            asked = {"prompts": [found.prompt], "chat": True, "first": True, "max_tokens": 64}
            train["generate"] = asked
        low_rank = {"adapter": {"use": "adapter.lora", "rank": RANK, "alpha": ALPHA}}
        return {
            "model": model,
            **(low_rank if request.lora else {}),
            "precision": {"use": "precision.policy", "compute": request.compute},
            "data": {
                "use": "data.text" if found and found.running else "data.chat",
                "heldout_fraction": chosen.fraction,
                "files": request.named(str(request.data.absolute())),
                "sequence_length": chosen.sequence,
                **({"bad_rows": chosen.bad_rows} if found else {}),
            },
            "optimizer": {
                "use": "optimizer.adamw", "warmup_ratio": chosen.warmup,
                "lr": _rate(request)[0], "weight_decay": 0.0 if request.lora else 0.1,
            },
            "wrap": {},
            "checkpoint": {"use": "checkpoint.sharded", "every": chosen.save_every, "keep": 2},
            "train": train,
            "consolidate": {"use": "consolidate.stream"},
            "export": {"use": "export.safetensors", "dtype": "bf16"},
        }  # fmt: skip

    def look(self, ctx: Context, model: Mapping[str, Any], file: Path) -> DataSurvey:
        """Look at the rows of a file, for `AdviceRequest.survey`."""
        from stages.finetune_data import survey

        return survey(ctx, model, file)

    def prefers_low_rank(self, survey: DataSurvey | None) -> tuple[bool, str]:
        """Return whether low-rank updates suit the model better than all weights, and why."""
        size = survey.parameters if survey else None
        if size is None:
            return True, "the model's size is not known: low-rank updates fit almost anywhere"
        told = f"{size / 1e9:.2g}B" if size >= 1e9 else f"{size / 1e6:.3g}M"
        if size <= FEW:
            return False, f"with {told} parameters, all weights can be trained"
        return True, f"low-rank updates of {told} parameters take a fraction of their memory"

    def explained(
        self, request: AdviceRequest, slots: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[str]:
        """Yield a line for each choice, as `slots` have it in the end."""
        if request.survey is None:
            return
        yield from request.survey.lines()
        length, batch = request.sequence, request.global_batch
        chosen = choose(request.survey, sequence=length, batch=batch, ranks=request.ranks)
        train, optimizer, lora = slots["train"], slots["optimizer"], request.lora
        values = {
            "sequence_length": chosen.sequence, "bad_rows": chosen.bad_rows,
            "heldout_fraction": chosen.fraction, "epochs": chosen.epochs,
            "global_batch_size": chosen.batch, "warmup_ratio": chosen.warmup,
            "eval_every": chosen.eval_every, "checkpoint.every": slots["checkpoint"]["every"],
        }  # fmt: skip
        for name, value in values.items():
            yield f"{name} {'null' if value is None else value}: {chosen.why[name]}"
        if "generate" in train:
            yield "generate: a question from the data, answered before and after training"
        most = f"at most {MOST_TOKENS[request.on_gpus]:,} tokens per pass"
        yield f"micro_batch_size {train['micro_batch_size']}: {most}"
        rate, other = _rate(request), _rate(replace(request, lora=not lora))[0]
        others = "all weights" if lora else "LoRA"
        yield f"lr {optimizer['lr']:g}: {rate[1]} ({other:g} for {others})"
        decay = "LoRA has few weights to decay" if lora else "all weights (0 for LoRA)"
        yield f"weight_decay {optimizer['weight_decay']:g}: {decay}"
        if lora:
            scale = f"updates are multiplied by alpha / rank = {ALPHA / RANK:g}"
            yield f"lora: rank {RANK}, alpha {ALPHA}: {scale}"
        at, procs = "these GPUs compute in it at full speed", "one for each GPU"
        if not request.on_gpus:
            at = "most CPUs only emulate bf16"
            procs = "one process uses all cores; each further one takes as much memory again"
        yield f"compute {slots['precision']['compute']}: {at}"
        yield f"procs {request.ranks}: {procs}"
        dtype = slots["export"]["dtype"]
        yield f"export.dtype {dtype}: half the size of fp32, as most models have it"
        if request.survey.template:
            yield f"chat_template {request.survey.template}: the tokenizer has none"


def _rate(request: AdviceRequest) -> tuple[float, str]:
    """Return the learning rate, and why. For all weights, it and the weight decay are as in Llama
    2's fine-tuning (Touvron et al. 2023, section 3.1); LoRA takes about ten times the rate
    (Schulman et al. 2025, LoRA Without Regret)."""
    # A model of which the size is not known counts as a large one.
    size = (request.survey.parameters if request.survey else None) or LARGE
    if request.lora and size >= LARGE:
        return 1e-4, "LoRA from 30B parameters"
    if request.lora:
        return 2e-4, "LoRA below 30B parameters"
    if size >= SMALL:
        return 2e-5, "all weights from 1B parameters"
    return 1e-4, "all weights of a model below 1B parameters"


finetune = Finetune()
