"""New and unused tensors, and other sizes, are exactly the ones that the recipe allows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.contracts.precision import Precision
from pipeline.contracts.tensors import TensorReader, TensorSpec
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.model.hf import HfModel
from stages.model.reconcile import Allowed, fit, sized, sort_out
from stages.optimizer.adamw import AdamW
from stages.weights.views import MemoryReader
from tests.support import runs
from tests.support.models import context, filled, logits, random_source, tiny_llama_config
from tests.support.processes import run_ranks
from tests.support.readers import raw, require_equal
from tests.support.state import WRAPS, digest, hashed

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
SEED, SOURCE_SEED = 3, 11
"""Seeds of the run, and of the model that is its source."""


def saved(folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> dict[str, Tensor]:
    """Save a model in a folder; return its state dict."""
    source = random_source(tiny_llama_config(**config), folder, seed=SOURCE_SEED)
    model = filled(source).to(dtype)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def edit(folder: Path, change: Any) -> None:
    """Rewrite the folder's tensors after `change(tensors)` changed the dict."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def opened(folder: Path, seed: int = SEED, **fields: Any) -> Any:
    return HfModel(path=str(folder), **fields).run(context(folder, seed=seed))


def drawn(name: str, seed: int = SEED, **config: Any) -> Tensor:
    """Return the architecture's own initial value of a tensor."""
    source = random_source(tiny_llama_config(**config), Path(), seed=seed)
    return source.weights().read(name)


def refused(folder: Path, **fields: Any) -> str:
    with pytest.raises(StageError) as caught:
        opened(folder, **fields).weights()
    return str(caught.value)


# New tensors.


def base_model(folder: Path) -> dict[str, Tensor]:
    """Save a model without its head, and without the prefix that it has beside one; return the
    state dict of the model with the head."""
    model = filled(random_source(tiny_llama_config(), folder, seed=SOURCE_SEED))
    model.model.save_pretrained(folder)
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    return dict(model.state_dict())


def test_a_base_model_is_refused_without_a_word_about_its_head(tmp_path: Path) -> None:
    base_model(tmp_path)
    said = refused(tmp_path)
    assert f"do not fit LlamaForCausalLM: missing 1 tensor ({HEAD})" in said
    assert "in the model slot: new_weights" in said


def test_a_base_model_with_a_new_head(tmp_path: Path) -> None:
    state = base_model(tmp_path)
    expected = state | {HEAD: drawn(HEAD)}
    assert raw(expected[HEAD]) != raw(state[HEAD])
    source = opened(tmp_path, new_weights=["lm_head.*"])
    require_equal(source.weights(), expected)
    model = filled(source)
    model.lm_head.weight = nn.Parameter(state[HEAD])
    assert torch.equal(logits(model), logits(filled(random_whole())))


def random_whole() -> Any:
    return random_source(tiny_llama_config(), Path(), seed=SOURCE_SEED)


def test_a_new_head_is_the_run_s_seed_s(tmp_path: Path) -> None:
    base_model(tmp_path)
    heads = {
        seed: opened(tmp_path, seed=seed, new_weights=["lm_head.*"]).weights().read(HEAD)
        for seed in (1, 2)
    }
    assert raw(heads[1]) == raw(drawn(HEAD, seed=1))
    assert raw(heads[2]) == raw(drawn(HEAD, seed=2))
    assert raw(heads[1]) != raw(heads[2])


def test_what_the_source_has_is_not_loaded_where_it_is_to_be_new(tmp_path: Path) -> None:
    state = saved(tmp_path)
    fresh = [HEAD, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    reader = opened(tmp_path, new_weights=[HEAD, "*.1.mlp.[ud]*"]).weights()
    expected = state | {name: drawn(name) for name in fresh}
    require_equal(reader, expected)
    new = sum(expected[name].nbytes for name in fresh)
    assert reader.bytes_read == sum(tensor.nbytes for tensor in state.values()) - new


def test_new_tensors_need_no_fitting_source(tmp_path: Path) -> None:
    state = saved(tmp_path)
    edit(tmp_path, lambda t: t.update({HEAD: torch.zeros(7, 36)}))
    require_equal(opened(tmp_path, new_weights=[HEAD]).weights(), state | {HEAD: drawn(HEAD)})


def test_new_tensors_have_the_architecture_s_dtype(tmp_path: Path) -> None:
    state = saved(tmp_path, dtype=torch.bfloat16)
    require_equal(opened(tmp_path, new_weights=[HEAD]).weights(), state | {HEAD: drawn(HEAD)})


@pytest.mark.parametrize("name", [HEAD, TABLE])
def test_half_of_a_tied_tensor_is_not_new(name: str, tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    said = refused(tmp_path, new_weights=[name])
    assert f"the model shares one tensor between {HEAD} and {TABLE}, but" in said


def test_a_tied_tensor_is_new_under_both_names(tmp_path: Path) -> None:
    state = saved(tmp_path, tie_word_embeddings=True)
    table = drawn(TABLE, tie_word_embeddings=True)
    reader = opened(tmp_path, new_weights=[HEAD, TABLE]).weights()
    require_equal(reader, state | {TABLE: table, HEAD: table})


# Unused tensors.


def test_tensors_without_use_are_refused_unless_it_is_said(tmp_path: Path) -> None:
    state = saved(tmp_path)
    extra = {"value_head.weight": torch.ones(1, 36), "value_head.bias": torch.ones(1)}
    edit(tmp_path, lambda t: t.update(extra))
    assert "unexpected 2 tensors, 148 B (value_head.bias, value_head.weight)" in refused(tmp_path)
    reader = opened(tmp_path, unused_weights={"value_head.*": "drop"}).weights()
    require_equal(reader, state)
    assert reader.bytes_read == sum(tensor.nbytes for tensor in state.values())


def test_a_tensor_that_is_used_can_not_be_left_out(tmp_path: Path) -> None:
    saved(tmp_path)
    said = refused(tmp_path, unused_weights={"*.norm.weight": "drop"})
    assert "missing 1 tensor (model.norm.weight)" in said


def test_one_of_two_tied_tensors_can_be_unused(tmp_path: Path) -> None:
    """The source has different values for the two; the recipe chooses one."""
    state = saved(tmp_path, tie_word_embeddings=True)
    other = {HEAD: state[TABLE] + 1}
    edit(tmp_path, lambda t: t.update(other))
    assert "shares one tensor" in refused(tmp_path)
    require_equal(opened(tmp_path, unused_weights={HEAD: "drop"}).weights(), state)
    theirs = opened(tmp_path, unused_weights={TABLE: "drop"}).weights()
    require_equal(theirs, state | dict.fromkeys((HEAD, TABLE), other[HEAD]))


# Another vocabulary.


ROWS = 131
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@TIED
@pytest.mark.parametrize("rows", [ROWS + 1, 150, 300])
def test_a_grown_vocabulary(tied: bool, rows: int, tmp_path: Path) -> None:
    config = {"tie_word_embeddings": tied}
    state = saved(tmp_path, **config)
    expected = dict(state)
    for name in (HEAD, TABLE):
        new = drawn(name, vocab_size=rows, **config)[ROWS:]
        assert new.std() == pytest.approx(0.02, rel=0.6)
        expected[name] = torch.cat([state[name], new])
    source = opened(tmp_path, vocab_size=rows)
    assert source.vocab_size == rows
    require_equal(source.weights(), expected)
    assert raw(logits(filled(source))[..., :ROWS]) == raw(logits(filled(opened(tmp_path))))


@TIED
@pytest.mark.parametrize("rows", [1, 100, ROWS - 1])
def test_a_cut_vocabulary(tied: bool, rows: int, tmp_path: Path) -> None:
    state = saved(tmp_path, tie_word_embeddings=tied)
    reader = opened(tmp_path, vocab_size=rows).weights()
    require_equal(reader, state | {name: state[name][:rows] for name in (HEAD, TABLE)})
    left_out = 2 * (ROWS - rows) * 36 * 4
    assert reader.bytes_read == sum(tensor.nbytes for tensor in state.values()) - left_out


def test_a_vocabulary_that_stays(tmp_path: Path) -> None:
    state = saved(tmp_path)
    require_equal(opened(tmp_path, vocab_size=ROWS).weights(), state)


def test_new_rows_of_a_source_in_bf16(tmp_path: Path) -> None:
    """The new rows have the source's dtype, however they are read."""
    state = saved(tmp_path, dtype=torch.bfloat16)
    reader = opened(tmp_path, vocab_size=150).weights()
    new = drawn(TABLE, vocab_size=150)[ROWS:]
    read = reader.read(TABLE)
    assert raw(read) == raw(torch.cat([state[TABLE], new.to(torch.bfloat16)]))
    masters = torch.empty(150 * 36)
    reader.read_into(TABLE, 0, masters)
    assert raw(masters) == raw(read.float())


def test_without_a_word_about_it_another_vocabulary_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, lambda t: t.update({TABLE: torch.zeros(140, 36), HEAD: torch.zeros(140, 36)}))
    said = refused(tmp_path)
    assert f"another shape 2 tensors ({HEAD} 140x36 instead of 131x36, {TABLE} 140x36" in said
    read = opened(tmp_path, vocab_size=ROWS).weights().read(HEAD)
    assert raw(read) == raw(torch.zeros(131, 36))


def test_only_rows_of_the_vocabulary_may_differ(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, lambda t: t.update({TABLE: torch.zeros(131, 35), HEAD: torch.zeros(131)}))
    said = refused(tmp_path, vocab_size=150)
    assert "another shape 2 tensors" in said
    assert f"{TABLE} 131x35 instead of 150x36" in said
    assert f"{HEAD} 131 instead of 150x36" in said


def test_the_fingerprint_follows_what_is_drawn(tmp_path: Path) -> None:
    saved(tmp_path)
    fields: list[dict[str, Any]] = [
        {}, {"vocab_size": 150}, {"new_weights": [HEAD]}, {"new_weights": ["*.0.mlp.*"]},
    ]  # fmt: skip
    prints = [opened(tmp_path, **one).fingerprint for one in fields]
    others = [opened(tmp_path, seed=SEED + 1, **one).fingerprint for one in fields]
    assert len(set(prints)) == 4
    assert [one == other for one, other in zip(prints, others, strict=True)] == [
        True, False, False, False,
    ]  # fmt: skip


def test_assets_say_the_new_size(tmp_path: Path) -> None:
    saved(tmp_path / "in")
    (tmp_path / "out").mkdir()
    opened(tmp_path / "in", vocab_size=150).save_assets(tmp_path / "out", dtype="fp32")
    assert '"vocab_size": 150' in (tmp_path / "out" / "config.json").read_text()


# Every world size.


DIFFERENT: list[dict[str, Any]] = [
    {"vocab_size": 150}, {"vocab_size": 100}, {"new_weights": ["lm_head.*", "*.1.*"]},
]  # fmt: skip


def told(dist: DistContext, folder: str, wrap: str) -> list[dict[str, str]]:
    """Return digests of the weights that ranks hold together, for each kind of difference."""
    ctx = runs.context(dist, folder, seed=SEED)
    precision = Precision(
        master="fp32", compute="fp32", reduce="fp32", buffer=None, loss_scaling=None
    )
    digests = []
    for fields in DIFFERENT:
        source = HfModel(path=folder, **fields).run(ctx)
        engine = WRAPS[wrap].run(ctx, source, precision, AdamW().run(ctx))
        found = digest(engine, dist)
        digests.append({key: one for key, one in found.items() if key.startswith("weight/")})
        engine.close()
    return digests


@pytest.mark.parametrize(("wrap", "ranks"), [("fsdp full", 1), ("ddp", 2), ("fsdp full", 3)])
def test_new_parts_are_the_same_on_every_world_size(wrap: str, ranks: int, tmp_path: Path) -> None:
    saved(tmp_path)
    digests = run_ranks(told, ranks, str(tmp_path), wrap)[0]
    for fields, found in zip(DIFFERENT, digests, strict=True):
        reader = opened(tmp_path, **fields).weights()
        names = list(reader.names())
        assert found == {f"weight/{name}": hashed(reader.read(name).view(-1)) for name in names}


# Mistakes.


@pytest.mark.parametrize("key", ["new_weights", "unused_weights"])
@pytest.mark.parametrize("pattern", ["lm_haed.*", "lm_head", "LM_HEAD.*", ""])
def test_a_pattern_that_matches_nothing(key: str, pattern: str, tmp_path: Path) -> None:
    saved(tmp_path)
    whose = "the model" if key == "new_weights" else str(tmp_path)
    given = (
        ["lm_head.*", pattern] if key == "new_weights" else dict.fromkeys((HEAD, pattern), "drop")
    )
    said = refused(tmp_path, **{key: given})
    assert said.startswith(f"{key}: {pattern!r} matches no tensor of {whose} (they are called ")
    assert "model.norm.weight" in said


def test_every_difference_is_in_one_error(tmp_path: Path) -> None:
    saved(tmp_path)

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["stray"] = tensors.pop("model.norm.weight")
        tensors["astray"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(52, 36)
        tensors[HEAD] = torch.zeros(())

    edit(tmp_path, damage)
    assert refused(tmp_path).startswith(
        f"the weights in {tmp_path} do not fit LlamaForCausalLM: "
        "missing 2 tensors (model.layers.0.mlp.up_proj.weight, model.norm.weight); "
        "unexpected 2 tensors, 7.8 KB (astray, stray); "
        f"of another shape 2 tensors ({HEAD} scalar instead of 131x36, "
        "model.layers.1.mlp.up_proj.weight 52x36 instead of 53x36) (declare intended differences "
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"new_weights": ["a"]}, ["new_weights: `new_weights` needs weights that are loaded"]),
        ({"unused_weights": {"a": "drop"}}, ["unused_weights: `unused_weights` needs weights"]),
        ({"vocab_size": 3}, ["vocab_size: `config` sets it already"]),
        (
            {"new_weights": ["a"], "unused_weights": {"b": "drop"}, "vocab_size": 3},
            ["new_weights: ", "unused_weights: ", "vocab_size: "],
        ),
    ],
)
def test_mistakes_that_show_before_a_start(fields: dict[str, Any], expected: list[str]) -> None:
    problems = problems_of(config=tiny_llama_config(), **fields)
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)


def problems_of(**fields: Any) -> list[str]:
    plan = plan_view({})
    return [str(problem) for problem in HfModel(**fields).check(plan)]


def test_a_folder_s_weights_may_differ_unless_they_are_random(tmp_path: Path) -> None:
    saved(tmp_path)
    other: dict[str, Any] = {"new_weights": ["a"], "unused_weights": {"b": "drop"}}
    fields = {"path": str(tmp_path), "vocab_size": 3, **other}
    assert problems_of(**fields) == []
    assert problems_of(**fields, init="random") == [
        f"{key}: `{key}` needs weights that are loaded" for key in ("new_weights", "unused_weights")
    ]
    source = opened(tmp_path, init="random", vocab_size=150)
    assert raw(source.weights().read(HEAD)) == raw(drawn(HEAD, vocab_size=150))


# Buffers.


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def deepseek() -> dict[str, Any]:
    """Return an architecture whose files hold a buffer: the balance of a router."""
    config = tiny_llama_config(
        model_type="deepseek_v3", num_key_value_heads=6, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=10, first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=12,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=6, n_shared_experts=1,
    )  # fmt: skip
    del config["head_dim"]
    return config


def test_a_buffer_that_the_file_has_is_loaded(tmp_path: Path) -> None:
    model = filled(random_source(deepseek(), tmp_path))
    model.get_buffer(BIAS).copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path)
    require_equal(opened(tmp_path).weights(), model.state_dict())
    assert torch.equal(opened(tmp_path).weights().read(BIAS), torch.arange(4.0))


def test_a_buffer_that_the_file_lacks_is_missing_or_new(tmp_path: Path) -> None:
    model = filled(random_source(deepseek(), tmp_path))
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(BIAS))
    assert f"missing 1 tensor ({BIAS})" in refused(tmp_path)
    reader = opened(tmp_path, new_weights=["*.e_score_correction_bias"]).weights()
    require_equal(reader, model.state_dict() | {BIAS: torch.zeros(4)})


class Buffered(nn.Module):
    """A model with buffers of other dtypes, one of which its files may lack."""

    _keys_to_ignore_on_load_missing = [r"^steps$"]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.tensor([3, 5]))
        self.register_buffer("steps", torch.tensor((1 << 60) + 1))
        self.register_buffer("scale", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("table", torch.ones(2), persistent=False)


def fitted(held: dict[str, Tensor], **allowed: Any) -> TensorReader:
    model = Buffered()
    fresh = MemoryReader(model.state_dict())
    log = logging.getLogger("pipe.testing")
    return fit("here", MemoryReader(held), model, {}, Allowed(**allowed), lambda: fresh, log)


def test_buffers_keep_their_dtype_when_they_are_new(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = Buffered().state_dict()
    require_equal(fitted({}, new=["*"]), state)
    assert not caplog.messages
    stored = {"counts": torch.tensor([1, 2], dtype=torch.int32), "scale": torch.tensor(0.5)}
    reader = fitted(stored)
    assert caplog.messages == ["not in here, so initialised: 1 tensor (steps)"]
    require_equal(reader, state | stored)
    assert reader.spec("steps") == TensorSpec((), torch.int64)
    assert int(reader.read("steps")) == (1 << 60) + 1


def test_a_missing_buffer_is_an_error_unless_the_architecture_minds_none() -> None:
    with pytest.raises(StageError, match=r"missing 2 tensors \(counts, scale\)") as caught:
        fitted({})
    assert "steps" not in str(caught.value)


def fates(names: str, wanted: str = "", towers: str = "", **stated: Any) -> tuple[list[str], ...]:
    found = sort_out(names.split(), wanted.split(), towers.split(), stated)
    return found.passed, found.dropped, found.undeclared


def test_each_tensor_that_is_not_read_has_a_fate() -> None:
    assert fates("a b c", wanted="a") == ([], [], ["b", "c"])
    assert fates("a b c", wanted="a", towers="c", b="drop") == (["c"], ["b"], [])
    assert fates("a b c", wanted="a", b="pass_through", c="drop") == (["b"], ["c"], [])
    assert fates("a b", wanted="a b", b="drop") == ([], ["b"], [])


def test_the_first_pattern_that_matches_counts() -> None:
    found = sort_out(["mtp.a", "mtp.b"], [], [], {"mtp.a": "drop", "mtp.*": "pass_through"})
    assert (found.passed, found.dropped) == (["mtp.b"], ["mtp.a"])


@pytest.mark.parametrize(
    "name",
    ["h.0.attn.bias", "gpt_neox.layers.1.attention.masked_bias", "model.rotary_emb.inv_freq",
     "embeddings.position_ids", "rope_freqs.weight", "h.0.crossattention.bias"],
)  # fmt: skip
def test_computed_tables_are_dropped(name: str) -> None:
    assert fates(name) == ([], [name], [])


@pytest.mark.parametrize(
    "name", ["h.0.attn.c_attn.bias", "model.layers.0.self_attn.q_proj.bias", "attention_bias"]
)
def test_weights_are_no_tables(name: str) -> None:
    assert fates(name) == ([], [], [name])


def test_fates_that_cannot_be() -> None:
    with pytest.raises(StageError, match="b cannot be dropped"):
        fates("a b", towers="b", b="drop")
    with pytest.raises(StageError, match="a is used, and so cannot be passed through"):
        fates("a b", wanted="a", a="pass_through")


def test_number_bytes_and_names() -> None:
    held = MemoryReader({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    assert sized(["a", "b"], held) == "2 tensors, 16 B (a, b)"
    assert sized(["b"], held) == "1 tensor, 4 B (b)"
