"""Draw configurations with arbitrary values, for Hypothesis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from pipeline.importing.translator import Translation
from stages.importing.rules import Table

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(allow_nan=False), st.just("auto"),
    st.sampled_from(["steps", "no", "cpu", "nvme", "linear", "AdamW", "1e-3", "", "x/y"]),
    st.lists(st.floats(0, 1), max_size=2),
)  # fmt: skip


def contents(table: Table) -> st.SearchStrategy[dict[str, Any]]:
    """Draw blocks of a table's keys with arbitrary values."""
    entries = {
        key: VALUES if callable(rule) else st.one_of(VALUES, contents(rule))
        for key, rule in table.items()
        if key not in ("deepspeed", "fsdp_config")  # the keys that name files
    }
    return st.fixed_dictionaries({}, optional=entries)


def leaves(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the keys whose value is no block, or an empty one."""
    found: list[str] = []
    for key, value in content.items():
        inner = isinstance(value, Mapping) and value
        found += leaves(value, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return found


def assert_every_key_has_an_outcome(content: Mapping[str, Any], made: Translation) -> None:
    """Assert that each key has one outcome, with what became of it or the reason."""
    for leaf in leaves(content):
        keys = [each.key for each in made.outcomes if f"{leaf}.".startswith(f"{each.key}.")]
        assert len(keys) == 1, (leaf, keys)
    for each in made.outcomes:
        assert bool(each.to) == (each.outcome == "translated")
        assert each.to or each.why or each.outcome == "not translated"
    assert (made.recipe is None) == any(each.blocks for each in made.outcomes)
