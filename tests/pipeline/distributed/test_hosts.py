"""Host lists of Slurm, and DeepSpeed's hostfiles."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.distributed.hosts import expand_counts, expand_hosts, own_rank, read_hostfile
from pipeline.errors import UsageError
from tests.support.tier import examples


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[001-003,7]-ib", ["n001-ib", "n002-ib", "n003-ib", "n7-ib"]),
        ("a[1-2],b,c[3]", ["a1", "a2", "b", "c3"]),
        ("r[1-2]n[08-10]", [f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "a[",
        "a[1-",
        "a[x]",
        "a]",
        "a[1-2-3]",
        "a[1-999999]",
        "a[0-9999]" + "[0-9999]" * 3,
    ],
)
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        expand_hosts(text)


@examples(50)
@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]{1,4}-?", fullmatch=True),
            st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=3),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_short_is_found(
    groups: list[tuple[str, list[tuple[int, int]], int]],
) -> None:
    short, long = [], []
    for name, spans, width in groups:
        ranges = [f"{low:0{width}}-{low + more:0{width}}" for low, more in spans]
        short.append(f"{name}[{','.join(ranges)}]" if ranges else name)
        for low, more in spans:
            long += [f"{name}{n:0{len(f'{low:0{width}}')}}" for n in range(low, low + more + 1)]
        long += [] if ranges else [name]
    assert expand_hosts(",".join(short)) == long


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE=2x3 does not read like"):
        expand_counts("2x3")


def test_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\nworker-1 slots=4  # fast\n  worker-2   slots = 4\n")
    assert list(read_hostfile(file).items()) == [("worker-1", 4), ("worker-2", 4)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hosts: no host in the file (a line reads: worker-1 slots=8)"),
        ("a\n", "hosts:1: `a` does not read like: worker-1 slots=8"),
        ("a slots=2\nb slots=0\n", "hosts:2: `b slots=0` does not read like"),
        ("a slots=2\na slots=2\n", "hosts:2: a occurs twice"),
        ("a slots=2\n#\nb slots=4\n", "hosts:3: b has 4 slots, but a has 2: all nodes need"),
    ],
)
def test_mistakes_in_a_hostfile(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_hostfile(file)
    assert words in str(caught.value)
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "none")


def test_this_machine_among_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-2.cluster")
    monkeypatch.setattr("pipeline.distributed.hosts._addresses", lambda _: set())
    file = Path("hosts")
    assert own_rank(file, ["worker-1", "worker-2"]) == 1
    assert own_rank(file, ["a", "b", "127.0.0.1"]) == 2
    with pytest.raises(UsageError, match=r"worker-2\.cluster, is none of the hosts in hosts: a, b"):
        own_rank(file, ["a", "b"])
    with pytest.raises(UsageError, match=r"is several of the hosts"):
        own_rank(file, ["worker-2", "127.0.0.1"])
