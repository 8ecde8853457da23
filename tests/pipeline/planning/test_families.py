"""Every causal language model of transformers has a plan, or a sentence that explains why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from memories.cases import Case
from memories.compare import job, step_peak
from memories.oracle import run

from pipeline.errors import PipeError
from pipeline.planning.estimate import ask_planners, combine
from pipeline.planning.trace.profiling import profile
from stages.model.source_text_compat import attentions
from tests.support.every_family import every, small
from tests.support.tier import spread

EAGER = "does not support an attention implementation"
SENTENCES = {
    "transformers does not say which modules of a .+ are its blocks": """biogpt blenderbot
        blenderbot-small ctrl marian mvp openai-gpt pegasus""",
    "each token of a .+ sees those after it, which it would be trained to predict": """bert
        bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert reformer
        rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet
        xmod""",
    "the loss of a row of a prophetnet depends on its padding": "prophetnet",
    "is a model of more than text, and an export needs weights of the rest": """fuyu gemma3 gemma3n
        gemma4 gemma4_unified got_ocr2""",
    "is a model of more than text, and its language model holds the part that reads images": "git",
    "random initialisation cannot be built": """cohere_compass_text dbrx gemma3n_text
        gemma4_unified_assistant hunyuan_v1_dense hunyuan_v1_moe lfm2_moe ministral
        moss_transcribe_diarize musicgen musicgen_melody qwen4_exp qwen4_exp_text zamba""",
    "the model cannot be run on tensors without values": """bailing_hybrid jetmoe kimi_linear
        longcat_flash minimax xlstm""",
    "the model runs some of its blocks more than once": "hrm_text",
    "its config has no num_hidden_layers": "blt",
    "the model's config cannot be used": "dots3_note mamba2",
    "the default config cannot be made": "gemma4_assistant",
}
"""Part of the message -> model types without a plan."""
SLOW = {"rwkv"}
"""Model types that loop over tokens for minutes, whose results are unknown."""
MUTE = SLOW | {kind for kinds in SENTENCES.values() for kind in kinds.split()}
NAMED = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


def apart(kind: str, folder: Path) -> float:
    """Return the relative difference between profile and trace."""
    has = attentions(kind)
    attention = {} if "sdpa" in has or not has else {"attention": "eager"}
    try:
        return _apart({"config": small(kind)} | attention, folder)
    except PipeError as error:
        if EAGER not in str(error):
            raise
        return _apart({"config": small(kind), "attention": "eager"}, folder)


def _apart(model: dict[str, object], folder: Path) -> float:
    case = Case(name="", model=model, ranks=2, length=96, samples=2)
    here = job(case, folder, "cuda")
    told = ask_planners(here, profile(here))
    reference = step_peak(run(here))
    return step_peak(combine(here.topology, told).device) / reference - 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", dict.fromkeys([*NAMED, *spread(every(), 3)]))
def test_a_type_has_a_plan_or_a_sentence(kind: str, tmp_path: Path) -> None:
    if kind in SLOW:
        pytest.skip("it loops over tokens for minutes")
    if kind not in MUTE:
        assert abs(apart(kind, tmp_path)) < 0.03
        return
    (said,) = (said for said, kinds in SENTENCES.items() if kind in kinds.split())
    with pytest.raises(PipeError, match=said):
        apart(kind, tmp_path)


def test_most_types_have_a_plan() -> None:
    kinds = set(every())
    assert kinds >= MUTE
    assert len(kinds - MUTE) >= 60
    assert not set(NAMED) & MUTE
