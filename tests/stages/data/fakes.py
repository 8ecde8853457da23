"""A tiny tokenizer and a model source that has only this tokenizer."""

from __future__ import annotations

from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from pipeline.contracts.model import ModelSource

PLAIN = (
    "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('who?') }}{% endif %}"
    "<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|s|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|e|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|e|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
SPECIAL = {"<|end|>": 256, "<|s|>": 257, "<|e|>": 258}


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return byte-level BPE without merges: one token for each byte, ids by sorted byte
    characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


class FakeSource(ModelSource):
    """The part of a model source that a data stage uses; counts the tokenizer's calls."""

    name = "fake"

    def __init__(
        self, template: str | None = PLAIN, *, eos: str | None = "<|end|>", bos: str | None = None
    ) -> None:
        """Tokens that the tokenizer's own call puts before a text, as Llama's do."""
        self.fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_tokenizer(), chat_template=template, model_max_length=8
        )
        self.fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        if eos:
            self.fast.eos_token = eos
        if bos:
            self.fast.bos_token = bos
            self.fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, SPECIAL[bos])]
            )
        self.rows = 259

    def tokenizer(self) -> Any:
        return self.fast

    @property
    def vocab_size(self) -> int:
        return self.rows

    @property
    def fingerprint(self) -> str:
        return "fake"

    build = weights = tie = blocks = scorer = save_assets = None  # type: ignore[assignment]


def ids(text: str) -> list[int]:
    """Return the ids of ASCII text, worked out by hand: printable ASCII is sorted first, '!' being
    0."""
    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    moved = {" ": "\u0120", "\n": "\u010a"}
    return [order.index(moved.get(character, character)) for character in text]
