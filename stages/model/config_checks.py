"""Facts and mistakes in a model's config and tokenizer files before anything starts; no torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from pipeline import Data, ModelSource, PlanView, Problem, StageError, TrainedRun, traits
from pipeline.utils import expanded
from stages.model.compat import size_by_default, type_code
from stages.model.files import (
    gguf_header,
    has_tokenizer,
    is_gguf,
    is_local,
    read_json,
)
from stages.model.settings import HfSettings

Config = Mapping[str, Any]


def config_of(stage: Any, plan: PlanView) -> Config | None:
    """Return the config of the model that a stage gets, if it can be read without a network."""
    models = plan.producers(stage, ModelSource)
    model = next((one for one in models if isinstance(one, traits.DeclaresConfig)), None)
    return None if model is None else model.config_at_hand()


def of_text(config: Config) -> Config:
    """Return the part of a config that is of its language model, which may be all of it."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def hf_model(stage: Any, plan: PlanView) -> HfSettings | None:
    """Return the slot of transformers' model that a stage gets, or that was changed for it."""
    models = plan.producers(stage, ModelSource)
    return next((one for one in models if isinstance(one, HfSettings)), None)


def declarations(stage: Any, plan: PlanView) -> Iterator[Any]:
    """Yield the stages whose settings the model that a stage gets has: changes of it, the latest
    first, then the model. Weights of a finished training have the changes before it merged."""
    merged = False
    for model in plan.producers(stage, ModelSource):
        if not merged or plan.producer(model, ModelSource) is None:
            yield model
        merged = merged or plan.producer(model, TrainedRun) is not None


def tokenizer_problems(
    stage: Any, plan: PlanView, *, no_template: str | None = None
) -> Iterator[Problem]:
    """Yield the problem of a stage that needs the tokenizer, if the model has none; of one that
    needs its chat template too, `no_template` says how to do without. Files on the hub are not
    looked at."""
    model = hf_model(stage, plan)
    if model is None or plan.forecast:
        return
    given = model.tokenizer or model.path
    if given is None and model.config is None:
        return
    if given is not None and (not is_local(given) or not expanded(given).exists()):
        return  # the model slot reports a missing path
    if model.tokenizer is None and model.config is None and model.config_at_hand() is None:
        return  # as it does a folder without a model
    has, has_its_template = given is not None, False
    if given is not None:
        place = expanded(given)
        if model.tokenizer is None and model.gguf_file is not None:
            place = place / model.gguf_file
        if not is_gguf(place.name):
            has, has_its_template = has_tokenizer(place), has_template(place)
        else:
            try:
                metadata = gguf_header(place).metadata
                has = "tokenizer.ggml.model" in metadata
                has_its_template = "tokenizer.chat_template" in metadata
            except StageError:
                has = has_its_template = True  # the run reports a damaged file
    if not has:
        yield Problem(
            message="needs a tokenizer, and the model comes without one",
            hint="set `tokenizer` in the model's slot to a folder that has one",
        )
    elif no_template is not None and not (has_its_template or model.chat_template):
        yield Problem(
            message=f"needs a chat template, and the tokenizer of {given} has none",
            hint="use an instruction-tuned model, name a template in `chat_template` in the "
            f"model's slot, or {no_template}",
        )


TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def has_template(folder: Path) -> bool:
    """Whether a folder has a chat template."""
    if any((folder / name).exists() for name in TEMPLATES):
        return True
    with contextlib.suppress(StageError):
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    return False


TABLES = {
    "biogpt": 1024, "codegen": 2048, "ctrl": 256, "gpt2": 1024, "gpt_bigcode": 1024,
    "gpt_neo": 2048, "gptj": 2048, "openai-gpt": 512, "opt": 2048,
}  # fmt: skip
"""Models that look positions up in a table, and fail beyond it -> positions, by default."""
POSITIONS = ("max_position_embeddings", "n_positions")
"""Names that architectures give the number of positions in their configs."""


def too_long(stage: HfSettings, plan: PlanView) -> Iterator[Problem]:
    """Yield slots whose samples may be longer than the model's positions; see `TABLES`."""
    config = of_text(stage.config_at_hand() or {})
    kind = config.get("model_type")
    on_hub = stage.path is not None and not is_local(stage.path)
    if on_hub and kind not in TABLES and not any(name in config for name in POSITIONS):
        return  # known_models.json has sizes only, and the type's default may be another number
    context = stated_context(config)
    if context is None:
        return
    readers = list(plan.readers(stage))
    given = [*readers, *(plan.producer(reader, Data) for reader in readers)]
    data = {plan.slot(one): one for one in given if isinstance(one, traits.LimitsLength)}
    for slot, one in data.items():
        if one.sequence_length > context:
            yield Problem(
                message=f"samples of slot `{slot}` may have {one.sequence_length} tokens, and the "
                f"model has {context} positions",
                hint=f"set {slot}.sequence_length to {context} or less",
                warning=kind not in TABLES,
            )


def table_of_positions(config: Config) -> int | None:
    """Return the rows of the table of a model's positions; None if it computes them."""
    return stated_context(config) if str(config.get("model_type")) in TABLES else None


def stated_context(config: Config) -> int | None:
    """Return the positions that a config states, or its type by default, including those that
    scaling its rotary angles adds; None if it states none."""
    kind = str(config.get("model_type"))
    defaults = (size_by_default(kind, name) for name in POSITIONS)
    default = TABLES.get(kind) or next(filter(None, defaults), None)
    stated = next((config[name] for name in POSITIONS if name in config), default)
    if type(stated) is not int or stated < 1:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return stated
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isfinite(factor):
        return stated
    return max(stated, int(factor * (original if type(original) is int else stated)))


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names that architectures give the number of experts in their configs."""


def has_experts(config: Config) -> bool:
    """Whether a config is of a mixture of experts."""
    parts = [value for value in config.values() if isinstance(value, Mapping)]
    return any(part.get(key) for part in (config, *parts) for key in EXPERTS)


_DECODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert
    reformer rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl
    xmod"""
SEE_LATER_TOKENS = dict.fromkeys(_DECODERS.split(), "is_decoder") | {
    "cpmant": None, "xlm": "causal", "xlnet": None,
}  # fmt: skip
"""Types whose tokens see those after them -> the key of their config that prevents it; None where
nothing does. transformers has them as causal language models, as they can be used as parts of
others."""
SEE_PADDING = ("prophetnet",)
"""Types whose rows have other losses when they are padded."""


def sees_later_tokens(config: Config) -> tuple[str, str] | None:
    """Return message and hint about a model whose tokens see the tokens that they are to predict,
    or the padding after them; None for a causal one."""
    kind = str(config.get("model_type"))
    if kind in SEE_PADDING:
        return f"the loss of a row of a {kind} depends on its padding", "train another architecture"
    key = SEE_LATER_TOKENS.get(kind)
    if kind not in SEE_LATER_TOKENS or (key is not None and config.get(key) is True):
        return None
    hint = "train another architecture" if key is None else f"set `{key}: true` in its config"
    return f"each token of a {kind} sees those after it, which it would be trained to predict", hint


LENGTHWISE = ("longrope", "dynamic")
"""LongRoPE (Ding et al. 2024), which has one table for texts up to a length and one for longer
ones, and dynamic NTK scaling, which has one for each length beyond the model's positions."""
OLD_NAME = "su"
"""The name of LongRoPE in older configs."""
OF_THE_BATCH = ("deepseek_v4",)
"""Types that ask for angles at further positions, which follow from the padded length."""


def lengthwise_kind(config: Config, *, of_rope: bool = False) -> str | None:
    """Return the kind of rotary tables that depend on the length of a text, or None."""
    kind = config.get("rope_type", config.get("type"))
    if of_rope and kind in (*LENGTHWISE, OLD_NAME):
        return str(kind)
    parts = ((key, value) for key, value in config.items() if isinstance(value, Mapping))
    found = (lengthwise_kind(value, of_rope=of_rope or "rope" in key) for key, value in parts)
    return next((one for one in found if one is not None), None)


def other_angles(config: Config, *, of_transformers: bool) -> tuple[str, str] | None:
    """Return message and hint about a model, by its config.json, whose angles depend on other rows
    than a token's own, as its code is not `of_transformers`, say; None for one whose do not."""
    kind = lengthwise_kind(config)
    if kind is None or (of_transformers and config.get("model_type") not in OF_THE_BATCH):
        return None
    message = f"its rotary tables are of kind {kind}, and depend on the longest row of a batch"
    hint = "train another model" if of_transformers else "leave out trust_remote_code"
    return f"{message} in its code", hint


_NEED_IMAGES = (
    "blip", "blip-2", "instructblip", "instructblipvideo", "pi0", "vision-encoder-decoder",
)  # fmt: skip
_ENCODE = ["florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"]
NOT_BY_TEXT = {
    **dict.fromkeys(_NEED_IMAGES, "reads an image in every pass"),
    **dict.fromkeys(_ENCODE, "encodes its input"),
    "diffusion_gemma": "does not write token after token",
    "evolla": "transformers has no class that loads it",
    "git": "its language model holds the part that reads images",
    "idefics": "its language model holds the part that reads images",
    "molmo2": "asks in training which tokens are of images",
}  # fmt: skip
"""Types of models of more than text that cannot be trained on text -> why."""
MOST = 2**31 - 1
"""The largest size of anything; a larger one is a slip, and no memory could hold it."""
MOST_BLOCKS = 1024
"""More than any model has (1000: Wang et al. 2022, DeepNet)."""
_SIZE = re.compile(r"(num|n)_.+|.*(size|_dim|_rank|_embeddings|_positions|_layers|_heads|d_model)")
BLOCKS = ("num_hidden_layers", "n_layer", "n_layers")
_NEVER_0 = (
    "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "n_embd", "n_head", "n_positions", "d_model",
)  # fmt: skip


def wrong_size(config: Config) -> str:
    """Return a sentence about the first impossible size, also of a part; empty without one."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            inner = wrong_size(value)
            if inner:
                return f"{key}.{inner}"
        elif type(value) is int and _SIZE.fullmatch(str(key)):
            least = 1 if key in _NEVER_0 else 0
            most = MOST_BLOCKS if key in BLOCKS else MOST
            if not least <= value <= most:
                return f"{key} is {value:.4g}, expected a whole number from {least} to {most}"
    return ""


def uneven_heads(config: Config) -> str:
    """Return a sentence about heads that do not divide the hidden size, if they have to."""
    kind, names = str(config.get("model_type")), ("hidden_size", "num_attention_heads")
    size, heads = (config.get(name) or size_by_default(kind, name) for name in names)
    refusal = "not a multiple of the number of attention"
    if not (size and heads and size % heads and refusal in type_code(kind, "configuration")):
        return ""
    return f"hidden_size is {size}, which num_attention_heads ({heads}) does not divide"
