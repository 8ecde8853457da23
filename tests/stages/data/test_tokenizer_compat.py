"""Tokens of pieces and sizes of tokens, compared with what the tokenizer reports of whole texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from stages.data import tokenizer_compat
from stages.data.tokenize import TextTokenizer, plain_ids
from stages.data.tokenizer_compat import cutter, token_sizes
from tests.stages.data.fakes import FakeSource, ids
from tests.support.tier import examples

NOVEL = Path(__file__).parents[3] / "recipes" / "data" / "persuasion.txt"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDINGS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDINGS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by(expression: str) -> Any:
    split = pre_tokenizers.Split(tokenizers.Regex(expression), behavior="isolated", invert=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_only])


def gpt2(**more: Any) -> Any:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": True, **more})


def smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2()])


KEEPING = processors.Sequence([
    processors.ByteLevel(trim_offsets=False),
    processors.TemplateProcessing(single="<|s|> $A", special_tokens=[("<|s|>", 1)]),
])  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"pre_tokenizer": gpt2()},
    "smollm": {"pre_tokenizer": smollm()},
    "llama3": {"pre_tokenizer": by(LLAMA3), "post_processor": KEEPING},
    "qwen2": {"pre_tokenizer": by(QWEN2), "normalizer": normalizers.NFC()},
    "gpt4o": {"pre_tokenizer": by(GPT4O)},
    "trimming": {"pre_tokenizer": gpt2(), "post_processor": processors.ByteLevel()},
}


def trained(**parts: Any) -> Any:
    """Return a tokenizer with 600 tokens, whose merges reach as far as its parts let them."""
    backend = tokenizers.Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.decoder = decoders.ByteLevel()
    texts = [
        NOVEL.read_text("utf-8")[:60_000],
        "\n\n\n",
        "a  b   c\n d /\n/x 12345 6",
        "é\u0301日本。\n",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|s|>", "<|e|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return trained(**KINDS[request.param])


SCRAPS = [
    "a", "word", "It", "'s", "'", " ", "  ", "\n", "\n\n", "\r\n", "\t", ".", ",", "!\n", "/", "_",
    "12", "3456", "é", "e\u0301", "\u0301", "日本", "。", "🎉", "\u1100", "\u1161", "\u00a0",
    "\u2003", "\x85", "\x1c", "<|e|>", "<|s|>", "²", "ß", "Ⅷ", "\u200b", "ไทย", "\u093f",
]  # fmt: skip
TEXTS = st.lists(
    st.sampled_from(SCRAPS) | st.text(max_size=3).filter(lambda text: "\0" not in text), max_size=40
).map("".join)


@examples(60)
@given(text=TEXTS, size=st.integers(1, 6))
def test_pieces_have_the_tokens_of_the_whole(tokenizer: Any, text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_compat, "PIECE", size)
        cut = cutter(tokenizer)(text)
    assert "".join(cut) == text
    inside = [token for each in plain_ids(tokenizer, cut) for token in each]
    assert inside == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_line_and_space_of_a_novel_can_be_cut_at(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_compat, "PIECE", 1)
    text = NOVEL.read_text("utf-8")[60_000:80_000]
    cut = cutter(tokenizer)(text)
    assert len(cut) > 0.5 * text.count(" ")
    inside = [token for each in plain_ids(tokenizer, cut) for token in each]
    assert inside == tokenizer(text, add_special_tokens=False)["input_ids"]


WHOLE: dict[str, dict[str, Any]] = {
    "a space before every text": {"pre_tokenizer": gpt2(add_prefix_space=True)},
    "no expression": {"pre_tokenizer": gpt2(use_regex=False)},
    "an unknown expression": {"pre_tokenizer": by(r"\w+ \w+|\s+|.")},
    "bytes before the expression": {
        "pre_tokenizer": pre_tokenizers.Sequence([gpt2(use_regex=False), by(LLAMA3)])
    },
    "another normalizer": {
        "pre_tokenizer": gpt2(), "normalizer": normalizers.Prepend("\u2581")
    },
    "no pre-tokenizer": {},
}  # fmt: skip


@pytest.mark.parametrize("parts", WHOLE.values(), ids=WHOLE)
def test_other_tokenizers_take_whole_texts(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_compat, "PIECE", 1)
    tokenizer = trained(pre_tokenizer=gpt2())
    for name, part in {"pre_tokenizer": None, **parts}.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    assert cutter(tokenizer)("two words here") == ["two words here"]


@pytest.mark.parametrize(
    "added",
    [
        tokenizers.AddedToken("two words"),
        tokenizers.AddedToken("<m>", lstrip=True),
        tokenizers.AddedToken("x", single_word=True),
    ],
)
def test_added_tokens_may_forbid_cuts(added: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_compat, "PIECE", 1)
    tokenizer = trained(pre_tokenizer=gpt2())
    assert len(cutter(tokenizer)("two words here")) == 3
    tokenizer.add_tokens([added])
    assert cutter(tokenizer)("two words here") == ["two words here"]


@examples(60)
@given(text=TEXTS)
def test_characters_of_tokens_are_those_that_the_tokenizer_reports(
    tokenizer: Any, text: str
) -> None:
    two = TextTokenizer(tokenizer)([text, text[::-1]])
    for tokens, same in zip(two, (text, text[::-1]), strict=True):
        assert (tokens.ids.tolist(), tokens.bounds.tolist()) == reported(tokenizer, same)


def reported(tokenizer: Any, text: str) -> tuple[list[int], list[list[int]]]:
    """Return the ids of a text, and for each the start and end of its characters, where white space
    that is left out of these belongs to the next token."""
    called = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    bounds, reached = [], 0
    for start, end in called["offset_mapping"]:
        bounds.append([min(start, reached), end])
        reached = max(reached, end)
    return called["input_ids"], bounds


def test_sizes_are_used_where_they_tell(tokenizer: Any) -> None:
    backend, counting = tokenizer.backend_tokenizer, TextTokenizer(tokenizer)
    if isinstance(backend.post_processor, processors.ByteLevel):
        assert token_sizes(tokenizer) is None
        return
    text = "Anne’s café,\n\n  and 12 more<|e|>\n"
    counted = counting._counted(text, plain_ids(tokenizer, [text])[0])
    assert counted is not None
    assert counted.bounds.tolist() == reported(tokenizer, text)[1]
    decomposed = "cafe\u0301"
    counted = counting._counted(decomposed, plain_ids(tokenizer, [decomposed])[0])
    assert (counted is None) == (backend.normalizer is not None)


def test_a_token_that_is_left_out_is_noticed() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = gpt2()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    counting = TextTokenizer(tokenizer)
    assert counting._counted("ab", [0, 1]) is not None
    assert counting._counted("acb", [0, 1]) is None
    (found,) = counting(["acb"])
    assert (found.ids.tolist(), found.bounds.tolist()) == reported(tokenizer, "acb")


class Louder(transformers.PreTrainedTokenizerFast):
    """A tokenizer whose own code changes texts."""

    def _encode_plus(self, text: Any, *arguments: Any, **more: Any) -> Any:
        louder = text.upper() if isinstance(text, str) else [each.upper() for each in text]
        return super()._encode_plus(louder, *arguments, **more)


def test_a_tokenizer_with_code_of_its_own_is_called() -> None:
    backend = FakeSource().fast.backend_tokenizer
    tokenizer = Louder(tokenizer_object=backend)
    assert plain_ids(tokenizer, ["ab c"]) == [ids("AB C")]
    (found,) = TextTokenizer(tokenizer)(["ab c"])
    assert found.ids.tolist() == ids("AB C")
    assert token_sizes(tokenizer) is None


def test_truncation_and_padding_of_an_earlier_call_do_not_last() -> None:
    tokenizer = FakeSource().fast
    tokenizer.pad_token = "<|end|>"
    tokenizer(["abc"], truncation=True, max_length=2, padding="max_length")
    assert plain_ids(tokenizer, ["abcd", "a"]) == [ids("abcd"), ids("a")]
