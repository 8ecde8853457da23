"""Facts of ranks that must be the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.distributed.agreement import Place, _differences, in_one

HERE = [(0, "a")] * 4
FOUR = [(0, "a"), (0, "a"), (1, "b"), (1, "b")]


def said(facts: list[dict[str, Any]], places: list[Place] = FOUR) -> str:
    return in_one(list(_differences(facts, places)))


def test_what_differs_is_named_with_its_ranks_and_nodes() -> None:
    digest = "d" * 64
    facts = [{"lr": 0.003, "model": digest}] * 2 + [{"lr": 0.3, "model": digest}] * 2
    assert said(facts) == (
        "lr is 0.003 on ranks 0 to 1 (node 0, a), 0.3 on ranks 2 to 3 (node 1, b)"
    )
    assert said(facts, HERE) == "lr is 0.003 on ranks 0 to 1, 0.3 on ranks 2 to 3"
    facts[1] = {"model": "e" * 64}
    assert said(facts) == (
        "lr is 0.003 on rank 0 (node 0, a), None on rank 1 (node 0, a), 0.3 on ranks 2 to 3 "
        "(node 1, b); model is dddddddddddd on ranks 0, 2 to 3 (node 0, a; node 1, b), "
        "eeeeeeeeeeee on rank 1 (node 0, a)"
    )


def test_many_differences_are_counted() -> None:
    facts = [{str(number): rank for number in range(9)} for rank in range(2)]
    assert said(facts, HERE[:2]).endswith("3 is 0 on rank 0, 1 on rank 1; and 5 more")


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=4))
def test_a_sentence_for_each_fact_that_differs(facts: list[dict[str, int]]) -> None:
    differ = {name for name in "abc" if len({each.get(name) for each in facts}) > 1}
    assert {text[0] for text in _differences(facts, HERE)} == differ
