"""Facts in the source of a transformers type, whose text is searched and not imported."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from stages.model.compat import causal_types, source_text

_BODY = re.MULTILINE | re.DOTALL


@functools.cache
def _code(kind: str, what: str = "modeling") -> str:
    """The source of a type's models or configs; empty if it is not found."""
    whole = kind.replace("-", "_")
    names = (whole, whole.removesuffix("_text"))
    return next(filter(None, (source_text(f"{name}/{what}_{name}.py") for name in names)), "")


@functools.cache
def _default(kind: str, name: str) -> str:
    """The default of a field in the source of a type's config; empty if it is not found."""
    classes = re.findall(r"^class \w+\(.*?(?=^class |\Z)", _code(kind, "configuration"), _BODY)
    own = next((one for one in classes if f'model_type = "{kind}"' in one), "")
    stated = re.search(rf"^    {name}: .*?= (\w+)$", own, re.MULTILINE)
    return "" if stated is None else stated[1]


def ties_by_default(kind: str) -> bool | None:
    """Whether head and embedding share their weight by default; None if it is not said."""
    return {"True": True, "False": False}.get(_default(kind, "tie_word_embeddings"))


def size_by_default(kind: str, name: str) -> int | None:
    """Return a size where a config does not state it; None if the type's source states none."""
    stated = _default(kind, name)
    return int(stated) if re.fullmatch(r"\d[\d_]*", stated) else None


@functools.cache
def tied_names(kind: str) -> tuple[str, str] | None:
    """Return the names of the head's weight and of the embedding's, which causal language models of
    a type share if their config says so; None if the source of the type does not say."""
    made = re.search(rf"^class {causal_types().get(kind)}\(.*?(?=^class |\Z)", _code(kind), _BODY)
    keys = made and re.search(r'_tied_weights_keys = {"(\S+\.weight)": "(\S+\.weight)"}', made[0])
    return (keys[1], keys[2]) if keys else None


def needs_even_heads(kind: str) -> bool:
    """Whether a type's config refuses a hidden size that its heads do not divide."""
    return "not a multiple of the number of attention" in _code(kind, "configuration")


@functools.cache
def attentions(kind: str) -> tuple[str, ...]:
    """Return the attention implementations that a type has, the fastest first, if it says."""
    name = kind.replace("-", "_")
    code = source_text(f"{name}/modeling_{name}.py")  # models of text and more have others
    if "(PreTrainedModel)" not in code:
        return ()  # its base class, which says it, is in another file
    known = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
    return (*(one for one, flag in known.items() if f"{flag} = True" in code), "eager")


def suited_attention(kind: str, device: str) -> str:
    """Return the fastest attention implementation that a type has and that needs no further
    package; `device`: cuda or cpu, where flex_attention computes no gradients."""
    known = [one for one in attentions(kind) if one != "flex_attention" or device != "cpu"]
    return known[0] if known else "sdpa"


@functools.cache
def linear_names(kind: str) -> Sequence[str]:
    """Return the names of linear layers in the source of a type, without longer ones."""
    assigned = r"self\.(\w+) = (?:nn\.Linear|Conv1D|\w+Linear)\("
    return sorted(set(re.findall(assigned, _code(kind))) - {"lm_head"})


@functools.cache
def lacks_name(kind: str, name: str) -> bool:
    """Whether no module or parameter of a type's models can have `name`, which is the case if their
    source does not have the word. False where models are made by other files than the type's."""
    code = _code(kind)
    return bool(code) and "AutoModel" not in code and not re.search(rf"\b{re.escape(name)}\b", code)
