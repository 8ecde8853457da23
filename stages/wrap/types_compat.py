"""Types of transformers' models that an axis does not divide, or that need settings of a strategy.
`tests/parity/test_every_type.py` trains all others. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import StageError

_KINDS = {
    "pipeline_parallel": {
        "has no one list of blocks that transformers names":
            "bart bigbird_pegasus biogpt blenderbot blenderbot-small blt ctrl hrm_text llama4 "
            "llama4_text marian mbart mllama moss_transcribe_diarize mvp openai-gpt opt pegasus "
            "plbart trocr whisper",
        "passes its blocks inputs made from token ids": "gemma3n_text gemma4_text",
        "passes more than hidden states from block to block":
            "deepseek_v4 glm_moe_dsa hy_v4 rwkv xlstm zaya",
        "keeps hidden states in another shape inside": "inkling2_text",
        "reads a layer of the embedding on each stage": "modernbert-decoder",
    },
    "context_parallel": {
        "computes attention by itself":
            "bart bigbird_pegasus biogpt blenderbot blenderbot-small bloom codegen falcon gpt_neo "
            "gpt_neox_japanese gptj marian mbart mpt mvp openai-gpt pegasus plbart stablelm trocr "
            "whisper xglm",
        "keeps a state along the sequence":
            "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm3 "
            "mamba minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next "
            "recurrent_gemma rwkv xlstm zamba2 zaya",
        "chooses tokens to attend to by all of them":
            "axk2 deepseek_v32 deepseek_v4 doge dots3_note_text glm_moe_dsa hy_v4",
        "has attention of kinds that are not divided": "blt inkling2_text inkling_text",
        "numbers positions by its mask": "opt",
    },
    "tensor_parallel": {
        "keeps its experts transposed, which is not divided": "aria_text llama4 llama4_text",
        "has parts next to its blocks that are not divided": "hrm_text moss_transcribe_diarize",
        "passes its blocks inputs made from token ids": "gemma4_text",
        "passes more than hidden states from block to block": "deepseek_v4 hy_v4",
        "chooses tokens to attend to by all of them": "doge dots3_note_text",
        "joins hidden states of several lengths": "inkling2_text",
        "has experts that compute nothing": "longcat_flash",
        "has a plan in transformers with parts that are not known here": "inkling_text",
        "has a gate with one value a head": "laguna",
        "has a plan in transformers that divides its head and not the embedding": "lfm2 lfm3",
    },
    "expert_parallel": {
        "has no experts that transformers divides":
            "doge jetmoe llama4 llama4_text longcat_flash",
        "has a plan of experts that divides a layer of all tokens, too": "gemma4_text",
    },
}  # fmt: skip
REFUSED: Mapping[str, Mapping[str, str]] = {
    field: {kind: reason for reason, kinds in reasons.items() for kind in kinds.split()}
    for field, reasons in _KINDS.items()
}
"""Field of an axis -> type of the language model -> why. Each continues "a TYPE"."""


SINKS, NO_PLAN, NO_BLOCKS, WITHOUT_GRADIENT = (
    frozenset(kinds.split())
    for kinds in (
        # Attention has a weight for each head that no token takes.
        "flint gpt_oss granite_swa granitemoe_swa mimo_v2_flash",
        # transformers has no plan of tensor parallelism.
        "bart bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom blt codegen ctrl "
        "falcon falcon_mamba gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese gptj jetmoe mamba "
        "marian mbart mllama modernbert-decoder moshi mpt mvp openai-gpt opt pegasus persimmon "
        "plbart recurrent_gemma rwkv stablelm trocr whisper xglm xlstm zamba2 zaya",
        # transformers does not say which modules are blocks.
        "bert-generation big_bird biogpt blenderbot blenderbot-small ctrl electra marian "
        "megatron-bert mvp openai-gpt pegasus rembert roberta-prelayernorm roc_bert roformer xmod",
        # Parameters get no gradient from text: attention to an encoder or an image, and what
        # chooses tokens without being trained by the loss.
        "axk2 bart bigbird_pegasus blenderbot blenderbot-small deepseek_v32 deepseek_v4 "
        "dots3_note_text glm_moe_dsa hy_v4 marian mbart mllama mvp pegasus plbart trocr whisper",
    )
)
"""Types of the language model about which each is true."""


def refuse_type(field: str, config: Any) -> None:
    """Raise StageError for a model, by its config, that the axis of `field` does not divide."""
    for kind in (config.model_type, config.get_text_config().model_type):
        if kind in REFUSED[field]:
            raise StageError(f"{field}: a {kind} {REFUSED[field][kind]}")
