"""Checkpoints in a store without rename: killed at every request, and over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.checkpoint.location import Retention, open_store
from pipeline.checkpoint.manifest import MANIFEST, Damaged
from pipeline.checkpoint.object_store import ObjectStore
from tests.support.injection import Fault
from tests.support.object_faults import install, write_apart
from tests.support.processes import forking
from tests.support.sweep import NEW, NEXT, OLD, record
from tests.support.tiny_store import Tiny, digests, read_digests, write


def test_killed_at_every_request(memory: Path) -> None:
    """`file://` is used like an object store: everything is put, listed and removed, nothing
    renamed."""
    recorded = record(memory, scheme="file://", install=install)
    place = f"pipe_file {recorded.root}/{NEW}"
    names = (MANIFEST, "attempt2/rank-00001.report")
    points = [recorded.place(rank, f"{place}/{name}") for rank, name in enumerate(names)]
    ways = [recorded.require_killed_anywhere(rank, points[rank], 8) for rank in range(2)]
    assert sum(ways) >= 40


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store")


def test_a_request_that_fails_hides_no_checkpoint(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(tiny(store), 1).problem == ""

    def timed_out(*_: object, **__: object) -> None:
        raise TimeoutError("the server did not answer")

    monkeypatch.setattr(store.fs, "info", timed_out)
    with pytest.raises(OSError, match="did not answer"):
        store.names()


def tiny(store: ObjectStore) -> Tiny:
    return Tiny(store.locate(""))


def entries(store: ObjectStore, name: str) -> list[str]:
    folder = Path(store.locate(name).removeprefix("file://"))
    return sorted(path.name for path in folder.iterdir())


def test_what_a_dead_attempt_left_beside_a_good_one_is_removed(store: ObjectStore) -> None:
    store.put(*store.begin(OLD, "dead").at("rank-00000.sums"), b"rest")
    write(tiny(store), 1, identity="alive")
    assert entries(store, OLD) == ["alive", "dead", MANIFEST]
    store.clean()
    assert entries(store, OLD) == ["alive", MANIFEST]
    assert read_digests(store, OLD) == digests(1)


def test_damaged_checkpoints_stay_whatever_becomes_of_their_step(store: ObjectStore) -> None:
    for identity in ("first", "second"):
        write(tiny(store), 1, identity=identity)
        assert store.quarantine(OLD) in store.quarantined()
    write(tiny(store), 1, identity="third")
    assert read_digests(store, OLD) == digests(1)
    store.delete(OLD)
    store.clean()
    assert store.names() == []
    kept = ["damaged-1-manifest.json", "damaged-2-manifest.json", "first", "second"]
    assert entries(store, OLD) == kept
    assert store.quarantined() == [store.locate(OLD, name) for name in kept[:2]]


def test_a_commit_whose_answer_is_lost_is_taken_back(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.fs.pipe_file

    def lose(path: str, data: bytes) -> None:
        put(path, data)
        if path.endswith(MANIFEST):
            raise RuntimeError("the connection is gone")

    monkeypatch.setattr(type(store.fs), "pipe_file", staticmethod(lose))
    outcome = write(tiny(store), 1)
    where = store.locate(OLD, MANIFEST).removeprefix("file://")
    assert outcome.problem == f"RuntimeError: the connection is gone: {where}"
    assert store.names() == []


def test_what_a_server_says_is_never_damage(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a moment without network would cost all checkpoints."""
    write(tiny(store), 1)

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(5, "an internal error of the server")

    monkeypatch.setattr(type(store.fs), "cat_file", fail)
    with pytest.raises(Exception, match="an internal error of the server") as told:
        read_digests(store, OLD)
    assert not isinstance(told.value, Damaged)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a bucket of a server on this machine that speaks S3."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import fsspec

    fsspec.config.set_conf_env(fsspec.config.conf)
    fs = fsspec.filesystem("s3")
    fs.mkdir("checkpoints")
    yield "s3://checkpoints/runs/one"
    fsspec.config.conf.pop("s3")
    server.stop()


def save(tiny: Tiny, step: int, identity: str, fault: Fault | None = None) -> list[int]:
    """Save from two processes, with the fault in rank 0; return their exit codes."""
    processes = [
        forking().Process(
            target=write_apart,
            args=(dict(os.environ), tiny, step, identity, rank, None if rank else fault),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def test_the_whole_protocol_over_http(bucket: str) -> None:
    tiny = Tiny(bucket, retention=Retention(last=2))
    store = open_store(bucket)
    assert store.names() == []
    assert write(tiny, 1).problem == ""
    assert read_digests(store, OLD) == digests(1)

    # rank 0: folder, file, header and four tensors, file complete, sums, report, manifest
    manifest = 10
    killed = save(tiny, 2, "b", Fault(root=bucket, at=manifest, how="before"))
    assert (killed, store.names()) == ([-9, 0], [OLD])
    store.clean()
    killed = save(tiny, 2, "c", Fault(root=bucket, at=manifest, how="after"))
    assert (killed, store.names()) == ([-9, 0], [OLD, NEW])
    assert read_digests(store, NEW) == digests(2)

    aside = store.quarantine(NEW)
    assert (store.names(), store.quarantined()) == ([OLD], [aside])
    assert write(tiny, 2, identity="d").problem == ""
    assert write(tiny, 3).problem == ""
    assert store.names() == [NEW, NEXT]
    assert read_digests(store, NEXT) == digests(3)

    fs = store.fs  # type: ignore[attr-defined]
    file = next(path for path in fs.find(f"checkpoints/runs/one/{NEXT}") if "rank-00001.sa" in path)
    fs.pipe_file(file, fs.cat_file(file)[:-1] + b"?")
    with pytest.raises(Damaged, match=r"random/00001/torch\): damaged near byte"):
        read_digests(store, NEXT)
