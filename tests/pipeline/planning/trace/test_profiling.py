"""Memory of a model's parts, by hand and next to the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memories.cases import Case, llama, own
from memories.compare import profile_and_trace

from pipeline.errors import PipeError
from pipeline.planning.forecast import Line, Part, Profile
from pipeline.planning.planner import Job
from pipeline.planning.trace.profiling import profile
from stages.model.compat import attentions
from stages.model.declared import outline
from tests.support.command import pipe
from tests.support.every_family import every, small
from tests.support.models import context
from tests.support.multimodal import saved, whole_source
from tests.support.tier import spread

TOKENS, HIDDEN, KEYS, INNER, HEADS, WORDS = 256, 256, 128, 688, 8, 4000
MATRICES = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER
SEEN = 4 * HIDDEN * TOKENS**2 // 2
"""Operations of causal attention in a block's forward: half of all pairs of tokens."""
CASE = Case(name="llama", model=own(**llama()), length=TOKENS, ranks=2)


def job(case: Case, folder: Path) -> Job:
    return Job.of(case.plan(folder), case.topology())


def profiled(folder: Path, **changes: Any) -> Profile:
    """Return the profile of a changed case, which is made once."""
    if repr(changes) not in _made:
        _made[repr(changes)] = profile(job(replace(CASE, **changes), folder))
    return _made[repr(changes)]


_made: dict[str, Profile] = {}


def test_a_block_by_hand(tmp_path: Path) -> None:
    """Bytes in bf16: two norms keep the fp32 and bf16 of their input and output (8 hidden each),
    attention queries and output (2 hidden each), keys, values (2 keys each) and a logarithm for
    each head, the MLP gate, activation, up and product (2 inner each)."""
    found = profiled(tmp_path)
    kept = 20 * HIDDEN + 4 * KEYS + 8 * INNER + 4 * HEADS + 8
    last = found.part("forward", 3)
    assert last.kept == Line(0, TOKENS * kept)
    assert found.part("backward", 3).kept.each == -TOKENS * kept
    assert [found.model.blocks.count(kind) for kind in (0, 1)] == [1, 3]
    assert last.products.at(1) == 2 * TOKENS * MATRICES
    assert last.attention.at(3) == 3 * SEEN


def test_a_step_by_hand(tmp_path: Path) -> None:
    """A step takes 6 operations for each element of a matrix, none for the embedding's; attention's
    backward has twice the products of its forward."""
    found = profiled(tmp_path)
    assert found.total("products").at(2) == 2 * TOKENS * 6 * (4 * MATRICES + WORDS * HIDDEN)
    assert found.total("attention").at(1) == 4 * 3 * SEEN
    assert found.total("again").at(1) == 0


def test_a_block_that_is_computed_again_keeps_its_input(tmp_path: Path) -> None:
    found = profiled(tmp_path, model=own(1, **llama()))
    assert found.part("forward", 3).kept == Line(0, TOKENS * 2 * HIDDEN)
    assert found.recomputed == (True, True)
    # All except for the last product, whose output backward does not need.
    again = 2 * TOKENS * (MATRICES - HIDDEN * INNER) + SEEN
    assert found.part("backward", 3).again.at(1) == again


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_fused_attention_is_planned_as_one_kernel(attention: str, tmp_path: Path) -> None:
    """It needs packages, or a GPU and values, to be run."""
    plain = profiled(tmp_path)
    fused = profiled(tmp_path, model={**own(**llama()), "attention": attention})
    for moment in ("forward", "backward"):
        assert fused.part(moment, 3).kept == plain.part(moment, 3).kept
    assert fused.total("attention") == plain.total("attention")


def test_fused_attention_of_an_architecture_without_sdpa(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4, "vocab_size": 64,
    }  # fmt: skip
    config = {"model_type": "gpt_oss", **sizes}
    scores = 2 * 4 * TOKENS**2
    kept = [
        profiled(tmp_path, model={"use": "model.hf", "config": config, "attention": one})
        .part("forward", 1)
        .kept.each
        for one in ("eager", "flex_attention")
    ]
    assert kept[0] - kept[1] > scores


def test_a_compiled_block_keeps_what_its_partition_keeps(tmp_path: Path) -> None:
    """Gate and up of the MLP, and what norms read, give the rest again: nearly a third less is
    kept, and much less is written, by the same products."""
    found = profiled(tmp_path, model={**own(**llama()), "compile": {}})
    assert found.recomputed == (False, False)
    kept = found.part("forward", 3).kept.each / TOKENS
    assert 4 * INNER < kept < 0.75 * (20 * HIDDEN + 4 * KEYS + 8 * INNER + 4 * HEADS + 8)
    plain = profiled(tmp_path)
    for amount in ("products", "attention"):
        assert found.total(amount).at(2) == pytest.approx(plain.total(amount).at(2), rel=1e-3)
    assert found.total("made").at(2) < 0.65 * plain.total("made").at(2)


def test_a_compiled_block_that_is_computed_again_keeps_its_input(tmp_path: Path) -> None:
    """Its attention takes random numbers, so that its compiled code sets their state back."""
    found = profiled(tmp_path, model={**own(1, **llama()), "compile": {}})
    assert found.part("forward", 3).kept == Line(0, TOKENS * 2 * HIDDEN)
    assert found.recomputed == (True, True)
    # Forward again, all except for the last product, whose output backward does not need.
    again = 2 * TOKENS * (MATRICES - HIDDEN * INNER)
    assert found.part("backward", 3).products.at(1) == 4 * TOKENS * MATRICES + again
    assert found.part("backward", 3).attention.at(1) == 3 * SEEN


def test_frozen_weights_take_no_gradient(tmp_path: Path) -> None:
    """A step takes 4 operations for each element of a frozen matrix, 2 in the first block: frozen
    embeddings need no gradient. An update takes 6."""
    found = profiled(tmp_path, adapter={"rank": 8})
    projections = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, KEYS)] * 2 + [(HIDDEN, INNER)] * 3
    updates = 8 * sum(map(sum, projections))
    backward = found.part("backward", 3).products.at(1)
    assert backward == TOKENS * (2 * MATRICES + 4 * updates)
    assert found.model.trained == 4 * updates
    assert (
        found.model.parameters == 4 * (MATRICES + updates + 2 * HIDDEN) + (2 * WORDS + 1) * HIDDEN
    )


def test_frozen_blocks_before_the_first_trained_weight_have_no_backward(tmp_path: Path) -> None:
    frozen = ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"]
    found = profiled(tmp_path, model={**own(**llama()), "frozen": frozen})
    assert found.model.blocks == (0, 1, 2, 3)
    assert [found.part("backward", block).products.at(1) for block in (0, 1)] == [0, 0]
    for block in (2, 3):
        assert found.part("backward", block).products.at(1) == 4 * TOKENS * MATRICES
    block = MATRICES + 2 * HIDDEN
    assert found.model.stored == found.model.trained == 2 * block + (WORDS + 1) * HIDDEN
    assert found.model.parameters == 4 * block + (2 * WORDS + 1) * HIDDEN
    assert {weight.frozen_base for weight in found.model.kinds[1]} == {True}


def test_frozen_blocks_behind_trained_ones_pass_gradients_on(tmp_path: Path) -> None:
    frozen = [f"model.layers.{number}.*" for number in (1, 2, 3)]
    found = profiled(tmp_path, model={**own(**llama()), "frozen": frozen})
    assert found.model.blocks == (0, 1, 1, 1)
    assert found.part("backward", 3).products.at(1) == 2 * TOKENS * MATRICES


def test_blocks_of_a_tower_are_units_that_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("gemma3", tmp_path / "saved")
    model = {"path": str(tmp_path / "saved")}
    alone = profiled(tmp_path, model=model, length=32)
    monkeypatch.setattr("stages.model.source.leave_out_towers", lambda model: None)
    frozen = ["model.vision_tower.*", "model.multi_modal_projector.*"]
    found = profiled(tmp_path, model={**model, "frozen": frozen}, length=32)
    assert (alone.model.blocks, found.model.blocks) == ((0, 1), (2, 0, 1))
    tower = found.model.kinds[2]
    assert {weight.name.rpartition(".layers.0.")[0] for weight in tower} == {
        "model.vision_tower.encoder"
    }
    assert {weight.frozen_base for weight in tower} == {True}
    assert not {weight.name for weight in tower} & {weight.name for weight in found.model.root}
    assert found.part("forward", 0) == Part()
    assert found.part("forward", 2) == alone.part("forward", 1)
    assert found.total("products") == alone.total("products")
    assert found.model.trained == alone.model.trained
    whole = sum(
        one.numel() for one in outline(whole_source(context(tmp_path), **model)).parameters()
    )
    assert found.model.parameters == whole


def test_experts_are_held_by_all_and_used_by_some(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    found = profiled(tmp_path, model=own(**llama(model_type="mixtral", **sizes)))
    expert, router = 3 * HIDDEN * INNER, 4 * HIDDEN
    attention = MATRICES - expert
    elements = sum(weight.elements for weight in found.model.kinds[-1])
    assert elements == attention + 4 * expert + router + 2 * HIDDEN
    assert found.part("forward", 3).products.at(1) == 2 * TOKENS * (attention + 2 * expert + router)


def test_blocks_of_two_kinds(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    more = {"model_type": "qwen2", "layer_types": kinds, "sliding_window": 8}
    found = profiled(tmp_path, model=own(**llama(use_sliding_window=True, **more)))
    assert found.model.blocks == (0, 1, 2, 1)


def test_a_model_that_fails_is_told_in_a_sentence(tmp_path: Path) -> None:
    replace(CASE, model=own(**llama(num_key_value_heads=3))).plan(tmp_path)
    said = pipe("plan", tmp_path / "recipe.yaml")
    assert said.exit_code == 1
    (line,) = said.output.splitlines()
    assert "the model cannot be run on tensors without values: " in line


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


def apart(kind: str) -> float:
    """Return the relative difference between profile and oracle."""
    has, config = attentions(kind), {"config": small(kind)}
    eager: dict[str, Any] = {**config, "attention": "eager"}
    case = Case(name="", model=eager, ranks=2, length=96, samples=2)
    if "sdpa" in has or not has:
        try:
            return profile_and_trace(replace(case, model=config)).error
        except PipeError as error:
            if EAGER not in str(error):
                raise
    return profile_and_trace(case).error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", dict.fromkeys([*NAMED, *spread(every(), 3)]))
def test_a_type_has_a_plan_or_a_sentence(kind: str) -> None:
    if kind in SLOW:
        pytest.skip("it loops over tokens for minutes")
    if kind not in MUTE:
        assert abs(apart(kind)) < 0.05
        return
    (said,) = (said for said, kinds in SENTENCES.items() if kind in kinds.split())
    with pytest.raises(PipeError, match=said):
        apart(kind)


def test_most_types_have_a_plan() -> None:
    kinds = set(every())
    assert kinds >= MUTE
    assert len(kinds - MUTE) >= 60
    assert not set(NAMED) & MUTE
