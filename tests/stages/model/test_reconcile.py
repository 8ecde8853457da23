"""Weights that a module gets: new and unused tensors and other sizes are exactly the ones that the
recipe allows; random weights are a pure function of seed and module."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.contracts.model import TensorReader, TensorSpec
from pipeline.contracts.optimizer import Precision
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.model.declared import outline
from stages.model.hf import HfModel
from stages.model.reconcile import Allowed, fit, sized, sort_out, unit_seed
from stages.optimizer.adamw import AdamW
from stages.weights.views import MemoryReader
from tests.support import model_folders, runs
from tests.support.model_folders import HEAD, TABLE, edit, tensors_of
from tests.support.models import (
    FAMILIES,
    filled,
    logits,
    random_source,
    tiny_llama_config,
    volatile_buffers,
)
from tests.support.processes import run_ranks
from tests.support.readers import raw, require_equal
from tests.support.state import WRAPS, digest, hashed
from tests.support.tier import examples

SEED, SOURCE_SEED = 3, 11
"""Seeds of the run, and of the model that is its source."""
HERE = Path()
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


def saved(folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> dict[str, Tensor]:
    """Save a model in a folder; return its state dict."""
    config = tiny_llama_config(**config)
    return dict(model_folders.saved(folder, config, seed=SOURCE_SEED, dtype=dtype).state_dict())


def opened(folder: Path, seed: int = SEED, **fields: Any) -> Any:
    return model_folders.opened(folder, seed=seed, **fields)


def weights(folder: Path, **fields: Any) -> TensorReader:
    reader: TensorReader = opened(folder, **fields).weights()
    return reader


def refused(folder: Path, **fields: Any) -> str:
    return model_folders.refused(folder, seed=SEED, **fields)


def drawn(name: str, seed: int = SEED, **config: Any) -> Tensor:
    """Return the architecture's own initial value of a tensor."""
    return random_source(tiny_llama_config(**config), HERE, seed=seed).weights().read(name)


# New tensors.


def base_model(folder: Path) -> dict[str, Tensor]:
    """Save a model without its head, and without the prefix that it has with one; return the state
    dict of the model with the head."""
    model = filled(random_source(tiny_llama_config(), folder, seed=SOURCE_SEED))
    model.model.save_pretrained(folder)
    assert "embed_tokens.weight" in tensors_of(folder)
    return dict(model.state_dict())


def test_a_base_model_with_a_new_head(tmp_path: Path) -> None:
    state = base_model(tmp_path)
    said = refused(tmp_path)
    assert f"do not fit LlamaForCausalLM: missing 1 tensor ({HEAD})" in said
    assert "in the model slot: new_weights" in said
    expected = state | {HEAD: drawn(HEAD)}
    assert raw(expected[HEAD]) != raw(state[HEAD])
    source = opened(tmp_path, new_weights=["lm_head.*"])
    require_equal(source.weights(), expected)
    model = filled(source)
    model.lm_head.weight = nn.Parameter(state[HEAD])
    whole = random_source(tiny_llama_config(), HERE, seed=SOURCE_SEED)
    assert torch.equal(logits(model), logits(filled(whole)))
    heads = [
        raw(weights(tmp_path, seed=seed, new_weights=["lm_head.*"]).read(HEAD)) for seed in (1, 2)
    ]
    assert heads == [raw(drawn(HEAD, seed=1)), raw(drawn(HEAD, seed=2))]
    assert heads[0] != heads[1]


def test_what_the_source_has_is_not_loaded_where_it_is_to_be_new(tmp_path: Path) -> None:
    state = saved(tmp_path)
    reader = weights(tmp_path, new_weights=[HEAD, "*.1.mlp.[ud]*"])
    expected = state | {name: drawn(name) for name in (HEAD, UP, DOWN)}
    require_equal(reader, expected)
    new = sum(expected[name].nbytes for name in (HEAD, UP, DOWN))
    assert reader.bytes_read == sum(tensor.nbytes for tensor in state.values()) - new
    edit(tmp_path, lambda t: t.update({HEAD: torch.zeros(7, 36)}))  # which need not fit
    require_equal(weights(tmp_path, new_weights=[HEAD]), state | {HEAD: drawn(HEAD)})


def test_new_tensors_have_the_architecture_s_dtype(tmp_path: Path) -> None:
    state = saved(tmp_path, dtype=torch.bfloat16)
    require_equal(weights(tmp_path, new_weights=[HEAD]), state | {HEAD: drawn(HEAD)})


def test_a_tied_tensor_is_new_under_both_names_or_none(tmp_path: Path) -> None:
    state = saved(tmp_path, tie_word_embeddings=True)
    for name in (HEAD, TABLE):
        said = refused(tmp_path, new_weights=[name])
        assert f"the model shares one tensor between {HEAD} and {TABLE}, but" in said
    table = drawn(TABLE, tie_word_embeddings=True)
    reader = weights(tmp_path, new_weights=[HEAD, TABLE])
    require_equal(reader, state | {TABLE: table, HEAD: table})


# Unused tensors.


def test_tensors_without_use_are_refused_unless_it_is_said(tmp_path: Path) -> None:
    state = saved(tmp_path)
    extra = {"value_head.weight": torch.ones(1, 36), "value_head.bias": torch.ones(1)}
    edit(tmp_path, lambda t: t.update(extra))
    assert "unexpected 2 tensors, 148 B (value_head.bias, value_head.weight)" in refused(tmp_path)
    reader = weights(tmp_path, unused_weights={"value_head.*": "drop"})
    require_equal(reader, state)
    assert reader.bytes_read == sum(tensor.nbytes for tensor in state.values())
    said = refused(tmp_path, unused_weights={"*.norm.weight": "drop", "value_head.*": "drop"})
    assert "missing 1 tensor (model.norm.weight)" in said


def test_one_of_two_tied_tensors_can_be_unused(tmp_path: Path) -> None:
    """The source has different values for the two; the recipe chooses one."""
    state = saved(tmp_path, tie_word_embeddings=True)
    other = {HEAD: state[TABLE] + 1}
    edit(tmp_path, lambda t: t.update(other))
    assert "shares one tensor between lm_head" in refused(tmp_path)
    require_equal(weights(tmp_path, unused_weights={HEAD: "drop"}), state)
    theirs = weights(tmp_path, unused_weights={TABLE: "drop"})
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
@pytest.mark.parametrize("rows", [1, 100, ROWS - 1, ROWS])
def test_a_cut_vocabulary(tied: bool, rows: int, tmp_path: Path) -> None:
    state = saved(tmp_path, tie_word_embeddings=tied)
    reader = weights(tmp_path, vocab_size=rows)
    require_equal(reader, state | {name: state[name][:rows] for name in (HEAD, TABLE)})
    left_out = 2 * (ROWS - rows) * 36 * 4
    assert reader.bytes_read == sum(tensor.nbytes for tensor in state.values()) - left_out


def test_new_rows_of_a_source_in_bf16(tmp_path: Path) -> None:
    """The new rows have the source's dtype, however they are read."""
    state = saved(tmp_path, dtype=torch.bfloat16)
    reader = weights(tmp_path, vocab_size=150)
    new = drawn(TABLE, vocab_size=150)[ROWS:]
    read = reader.read(TABLE)
    assert raw(read) == raw(torch.cat([state[TABLE], new.to(torch.bfloat16)]))
    masters = torch.empty(150 * 36)
    reader.read_into(TABLE, 0, masters)
    assert raw(masters) == raw(read.float())


def test_only_rows_of_the_vocabulary_may_differ_where_it_is_said(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, lambda t: t.update({TABLE: torch.zeros(140, 36), HEAD: torch.zeros(140, 36)}))
    said = refused(tmp_path)
    assert f"another shape 2 tensors ({HEAD} 140x36 instead of 131x36, {TABLE} 140x36" in said
    read = weights(tmp_path, vocab_size=ROWS).read(HEAD)
    assert raw(read) == raw(torch.zeros(131, 36))
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


def test_a_resized_model_s_assets_and_random_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "out").mkdir()
    opened(tmp_path, vocab_size=150).save_assets(tmp_path / "out", dtype="fp32")
    assert '"vocab_size": 150' in (tmp_path / "out" / "config.json").read_text()
    random = weights(tmp_path, init="random", vocab_size=150)
    assert raw(random.read(HEAD)) == raw(drawn(HEAD, vocab_size=150))


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
        reader = weights(tmp_path, **fields)
        names = list(reader.names())
        assert found == {f"weight/{name}": hashed(reader.read(name).view(-1)) for name in names}


# Mistakes.


@pytest.mark.parametrize("key", ["new_weights", "unused_weights"])
@pytest.mark.parametrize("pattern", ["lm_haed.*", "lm_head", "LM_HEAD.*", ""])
def test_a_pattern_that_matches_nothing(key: str, pattern: str, tmp_path: Path) -> None:
    saved(tmp_path)
    new = key == "new_weights"
    given = ["lm_head.*", pattern] if new else dict.fromkeys((HEAD, pattern), "drop")
    said = refused(tmp_path, **{key: given})
    whose = "the model" if new else str(tmp_path)
    assert said.startswith(f"{key}: {pattern!r} matches no tensor of {whose} (they are called ")
    assert "model.norm.weight" in said


def test_every_difference_is_in_one_error(tmp_path: Path) -> None:
    saved(tmp_path)

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["stray"] = tensors.pop("model.norm.weight")
        tensors["astray"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors[UP] = torch.zeros(52, 36)
        tensors[HEAD] = torch.zeros(())

    edit(tmp_path, damage)
    assert refused(tmp_path).startswith(
        f"the weights in {tmp_path} do not fit LlamaForCausalLM: "
        "missing 2 tensors (model.layers.0.mlp.up_proj.weight, model.norm.weight); "
        "unexpected 2 tensors, 7.8 KB (astray, stray); "
        f"of another shape 2 tensors ({HEAD} scalar instead of 131x36, "
        f"{UP} 52x36 instead of 53x36) (declare intended differences "
    )


# Buffers.


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_buffer_that_files_hold(tmp_path: Path) -> None:
    """The balance of a router."""
    config = tiny_llama_config(
        model_type="deepseek_v3", num_key_value_heads=6, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=10, first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=12,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=6, n_shared_experts=1,
    )  # fmt: skip
    del config["head_dim"]
    model = filled(random_source(config, tmp_path))
    model.get_buffer(BIAS).copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path)
    require_equal(weights(tmp_path, seed=0), model.state_dict())
    assert torch.equal(weights(tmp_path).read(BIAS), torch.arange(4.0))
    edit(tmp_path, lambda tensors: tensors.pop(BIAS))
    assert f"missing 1 tensor ({BIAS})" in refused(tmp_path)
    reader = weights(tmp_path, new_weights=["*.e_score_correction_bias"])
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
    return fit("here", MemoryReader(held), model, {}, Allowed(**allowed), lambda: fresh, log)[0]


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


# What becomes of tensors that are not read.


def fates(names: str, wanted: str = "", towers: str = "", **stated: Any) -> tuple[list[str], ...]:
    found = sort_out(names.split(), wanted.split(), towers.split(), stated)
    return found.passed, found.dropped, found.undeclared


def test_each_tensor_that_is_not_read_has_a_fate() -> None:
    assert fates("a b c", wanted="a") == ([], [], ["b", "c"])
    assert fates("a b c", wanted="a", towers="c", b="drop") == (["c"], ["b"], [])
    assert fates("a b c", wanted="a", b="pass_through", c="drop") == (["b"], ["c"], [])
    assert fates("a b", wanted="a b", b="drop") == ([], ["b"], [])
    first = sort_out(["mtp.a", "mtp.b"], [], [], {"mtp.a": "drop", "mtp.*": "pass_through"})
    assert (first.passed, first.dropped) == (["mtp.b"], ["mtp.a"])
    with pytest.raises(StageError, match="b cannot be dropped"):
        fates("a b", towers="b", b="drop")
    with pytest.raises(StageError, match="a is used, and so cannot be passed through"):
        fates("a b", wanted="a", a="pass_through")


def test_computed_tables_are_dropped_and_weights_are_not() -> None:
    tables = ["h.0.attn.bias", "gpt_neox.layers.1.attention.masked_bias",
              "model.rotary_emb.inv_freq", "embeddings.position_ids", "rope_freqs.weight",
              "h.0.crossattention.bias"]  # fmt: skip
    others = ["h.0.attn.c_attn.bias", "model.layers.0.self_attn.q_proj.bias", "attention_bias"]
    assert fates(" ".join([*tables, *others])) == ([], tables, others)


def test_number_bytes_and_names() -> None:
    held = MemoryReader({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    assert sized(["a", "b"], held) == "2 tensors, 16 B (a, b)"
    assert sized(["b"], held) == "1 tensor, 4 B (b)"


# Random weights.


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_every_family(family: str) -> None:
    source = random_source(FAMILIES[family], HERE, seed=3)
    built, reader = source.build(), source.weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    assert {name: tuple(reader.read(name).shape) for name in reader.names()} == shapes
    same, other = (random_source(FAMILIES[family], HERE, seed=seed) for seed in (3, 2))
    one = logits(filled(source))
    assert torch.equal(one, logits(filled(same)))
    assert one.isfinite().all()
    assert one.std() > 0.01
    others = other.weights()
    matrices = [name for name in reader.names() if reader.read(name).ndim > 1]
    assert matrices
    assert not any(torch.equal(reader.read(name), others.read(name)) for name in matrices)
    empty = outline(source)
    assert all(parameter.is_meta for parameter in empty.parameters())
    for name, buffer in volatile_buffers(built):
        assert torch.equal(empty.get_buffer(name), buffer), name
    names = {id(module): name for name, module in built.named_modules()}
    blocks = [names[id(block)] for block in source.blocks(built)]
    assert [name.rpartition(".")[2] for name in blocks] == ["0", "1"]


@examples(10)
@given(data=st.data())
def test_order_of_reading_does_not_matter(data: st.DataObject) -> None:
    source = random_source(FAMILIES["gpt2"], HERE)
    straight = source.weights()
    expected = {name: straight.read(name) for name in straight.names()}
    order = data.draw(st.permutations(sorted(expected)))
    shuffled = source.weights()
    for name in order:
        assert torch.equal(shuffled.read(name), expected[name]), name


def test_reading_leaves_the_generator_alone_and_may_be_written_into() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    reader = random_source(FAMILIES["llama"], HERE).weights()
    first = reader.read("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, reader.read(UP))
    reader.read("model.layers.0.mlp.up_proj.weight").zero_()
    assert torch.equal(reader.read("model.layers.0.mlp.up_proj.weight"), first)
    with pytest.raises(StageError, match="no tensor named nonsense"):
        reader.read("nonsense")


def test_gpt2_keeps_its_depth_scaling() -> None:
    config = FAMILIES["gpt2"] | {"n_embd": 120, "n_layer": 8}
    reader = random_source(config, HERE).weights()
    # Radford et al. 2019: residual projections are scaled by 1/sqrt(2 * layers).
    for name, std in (("mlp.c_proj", 0.02 / 4), ("mlp.c_fc", 0.02)):
        found = reader.read(f"transformer.h.3.{name}.weight").std().item()
        assert found == pytest.approx(std, rel=0.02)
    assert torch.equal(reader.read("transformer.h.3.ln_1.weight"), torch.ones(120))


def test_what_architectures_do_otherwise() -> None:
    gemma, tied = (random_source(FAMILIES[name], HERE) for name in ("gemma2", "llama_tied"))
    assert torch.equal(gemma.weights().read("model.norm.weight"), torch.zeros(36))
    volatile = {name for name, _ in volatile_buffers(gemma.build())}
    assert {"model.embed_tokens.embed_scale", "model.rotary_emb.inv_freq"} <= volatile
    assert torch.equal(tied.weights().read(HEAD), tied.weights().read(TABLE))


def test_seed_of_a_unit_is_pinned() -> None:
    # A silent change of the derivation would make old runs unrepeatable.
    assert unit_seed(0, "model.layers.0") == 0xE9C52F78FE6B475E
    assert unit_seed(0, "model.layers.0") != unit_seed(0, "model.layers.1")


def test_built_module_is_fp32_tied_and_without_cache() -> None:
    source = random_source(tiny_llama_config(tie_word_embeddings=True), HERE)
    model: Any = source.build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_parameter(HEAD) is model.get_parameter(TABLE)
    assert model.config.use_cache is False
    assert source.vocab_size == 131


def test_fingerprint_follows_config_and_seed() -> None:
    config = tiny_llama_config()
    same = {random_source(config, HERE, seed=1).fingerprint for _ in range(2)}
    assert len(same) == 1
    assert random_source(config, HERE, seed=2).fingerprint not in same
    assert random_source(config | {"rms_norm_eps": 1e-3}, HERE, seed=1).fingerprint not in same
