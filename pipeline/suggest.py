"""Did you mean ...?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, if any is like it at all."""
    names = list(options)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    # `length` is far from `sequence_length` by letters, but it is one of its words
    matches += [name for name in names if word in name.split("_") or name in word.split("_")]
    return matches[0] if matches else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A hint that names the closest option, else lists the options; empty without options."""
    names = list(options)
    found = closest(word, names)
    if found is not None:
        return f"did you mean `{found}`?"
    return f"known here: {', '.join(names)}" if names else ""
