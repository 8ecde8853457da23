"""Measure what grows with the number of ranks, on this machine, for runs that it cannot hold.

    python benchmarks/scale.py [--json FILE] [RANKS ...]

By default 1,024, 8,192 and 65,536 ranks, eight a node. Ranks are simulated: one process makes the
messages of all of them, through the product's own functions and a real store of torch's, and times
the side that serves them all. Where even that is too much (gloo's full mesh), a smaller number is
measured and the law is in the row. A row has seconds of the busiest process, bytes and messages of
one rank, and where the seconds are of.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import planning
import raw
import torch.distributed as dist
from tables import markdown

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.distributed.settings import Attempts, Restarts, Timeouts
from pipeline.execution import failures
from pipeline.launch.board import Board, connected, served
from pipeline.launch.nodes import _ORDERS, _STATE, HELLO, NODE
from pipeline.launch.rounds import End, Rounds, State
from tests.support.ports import free_port

PER_NODE = 8
SPEC_BYTES = 30_000
"""Of a run of an 8B model, as JSON."""
MESH = 32
"""Ranks with which gloo's full mesh is made here."""
Row = dict[str, Any]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the time that the work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def meeting(ranks: int) -> Iterator[Row]:
    """Nodes by hand: every node's state, read and judged by node 0, and one node's own exchange."""
    nodes, port = ranks // PER_NODE, free_port()
    lead = Board(served("127.0.0.1", port), "secret")
    own = Board(connected("127.0.0.1", port), "secret")
    rounds = Rounds(nodes=nodes, procs=PER_NODE, attempts=Attempts(Restarts()), timeouts=Timeouts())
    states = [
        replace(State.of(PER_NODE), agent=f"{n:016x}", address="10.0.0.1",
                session=rounds.orders.session, number=1)
        for n in range(nodes)
    ]  # fmt: skip
    text = _STATE.dump_json(states[0]).decode()

    def write() -> None:
        for number in range(nodes):
            own.write(f"{HELLO}/{number}", _STATE.dump_json(states[number]).decode())
            own.write(f"{NODE}/{number}", _STATE.dump_json(states[number]).decode())

    def turn() -> None:
        names = [f"{kind}/{number}" for number in range(nodes) for kind in (HELLO, NODE)]
        for name, sealed in lead.read_sealed(names):
            opened = lead.opened(name, sealed)
            assert opened is not None
            state, number = _STATE.validate_json(opened), int(name.partition("/")[2])
            rounds.greet(number, state, 1.0)
            rounds.note(number, state, 1.0)
        lead.write("orders", _ORDERS.dump_json(rounds.decide(1.0)).decode())

    written = seconds_of(write)
    yield {
        "what": "nodes meet, and each look of node 0", "ranks": ranks,
        "seconds": seconds_of(turn), "bytes": len(text) + 300, "messages": 2,
        "of": "node 0's process, all states new",
    }  # fmt: skip
    assert rounds.orders.runs
    yield {
        "what": "states of all nodes written", "ranks": ranks, "seconds": written,
        "bytes": len(text), "messages": 1, "of": "the store, one client for all nodes",
    }  # fmt: skip
    for number in range(nodes):
        stopped = replace(states[number], number=2, round=1, end=End(kind="stopped"))
        rounds.note(number, stopped, 2.0)
    yield {
        "what": "a stop of all nodes judged", "ranks": ranks,
        "seconds": seconds_of(lambda: rounds.decide(2.0)), "bytes": len(text) + 40, "messages": 2,
        "of": "node 0's process",
    }  # fmt: skip
    assert rounds.orders.over is not None


def store(ranks: int) -> Iterator[Row]:
    """The ranks' store: the run handed over, and a barrier. Every rank's request is made."""
    port = free_port()
    server = served("127.0.0.1", port)
    clients = [connected("127.0.0.1", port) for _ in range(8)]
    server.set("spec", "x" * SPEC_BYTES)

    def from_all(work: Callable[[Any], object]) -> Callable[[], None]:
        def one(client: Any) -> None:
            for _ in range(ranks // len(clients)):
                work(client)

        def run() -> None:
            threads = [threading.Thread(target=one, args=(client,)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return run

    yield {
        "what": "the run handed to all ranks", "ranks": ranks,
        "seconds": seconds_of(from_all(lambda client: client.get("spec"))), "bytes": SPEC_BYTES,
        "messages": 2, "of": "the store and its clients on one machine",
    }  # fmt: skip

    def barrier(client: Any) -> None:
        client.add("barrier", 1)
        client.check(["barrier"])

    yield {
        "what": "a barrier of all ranks", "ranks": ranks,
        "seconds": seconds_of(from_all(barrier)), "bytes": 60, "messages": 2,
        "of": "the store and its clients on one machine",
    }  # fmt: skip
    yield {
        "what": "ranks compare what they have", "ranks": ranks,
        "seconds": seconds_of(from_all(lambda client: client.get("barrier"))), "bytes": 130,
        "messages": 3 + 2 * math.ceil(math.log2(ranks)), "of": "the store; and an all-reduce",
    }  # fmt: skip


def checkpoint(ranks: int) -> Iterator[Row]:
    """Rank 0's plan of a first save of a 70B model under FSDP, and its manifest."""
    found = planning.measured("fsdp", ranks)
    yield {
        "what": "ranks agree on a checkpoint (first save)", "ranks": ranks,
        "seconds": found["rank_0"]["seconds"], "bytes": found["received_mb"] * 1e6 / ranks,
        "messages": 2, "of": f"rank 0; manifest {found['manifest_mb']} MB",
    }  # fmt: skip
    yield {
        "what": "a rank opens a checkpoint", "ranks": ranks,
        "seconds": found["opened"]["seconds"], "bytes": found["manifest_mb"] * 1e6, "messages": 1,
        "of": "any rank",
    }  # fmt: skip


def files(ranks: int) -> Iterator[Row]:
    """Logs of all ranks, and the search for the first failure when all have failed."""
    with tempfile.TemporaryDirectory() as folder:
        logs, run = Path(folder, "logs"), Path(folder)
        logs.mkdir()

        def write() -> None:
            for rank in range(ranks):
                (logs / f"rank-{rank:05d}.log").write_text("")

        yield {
            "what": "logs of all ranks begun", "ranks": ranks, "seconds": seconds_of(write),
            "bytes": 0, "messages": 1, "of": "one local disk, one process",
        }  # fmt: skip
        report = failures.RankFailure(
            time=1.0, rank=0, slot="train", message="Connection closed by peer", expected=False,
            refused=False, memory="", restart="after progress", place="",
        )  # fmt: skip
        (run / failures.FOLDER).mkdir()
        for rank in range(ranks):
            own = report.model_copy(update={"rank": rank}).model_dump_json()
            (run / failures.FOLDER / f"rank-{rank:05d}.json").write_text(own)
        yield {
            "what": "the first failure of all found", "ranks": ranks,
            "seconds": seconds_of(lambda: failures.first(run, [])), "bytes": len(own),
            "messages": 1, "of": "the launcher, once a restart",
        }  # fmt: skip


def mesh(ranks: int) -> Iterator[Row]:
    """gloo's full mesh: each rank connects to every other, and reads the addresses that each has
    written for all; and with TORCH_GLOO_LAZY_INIT, where it reads one address of each, and connects
    to those with whom it has to do. Made with few, all on this machine."""
    for lazy in (False, True):
        yield _mesh(ranks, lazy=lazy)


def _mesh(ranks: int, *, lazy: bool) -> Row:
    few, port = MESH, free_port()
    server = served("127.0.0.1", port)

    def join(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=120)
        options._devices = [dist.ProcessGroupGloo.create_device("127.0.0.1", lazy_init=lazy)]
        dist.ProcessGroupGloo(connected("127.0.0.1", port), rank, few, options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(few)]

    def all_join() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    seconds = seconds_of(all_join)
    names = (name.removeprefix("/") for name in server.list_keys())
    sent = sum(len(server.get(name)) for name in names)
    growth = ranks if lazy else ranks**2 / few
    return {
        "what": f"a rank joins gloo's {'lazy' if lazy else 'full'} mesh", "ranks": ranks,
        "seconds": seconds / few**2 * ranks, "bytes": sent / few * growth,
        "messages": (1 if lazy else 2) * (ranks - 1), "sockets": 0 if lazy else ranks - 1,
        "of": f"a rank, by {few} on this machine in {seconds:.2f} s; bytes by the number of "
        f"ranks{'' if lazy else ', squared'}",
    }  # fmt: skip


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
@click.argument("ranks", nargs=-1, type=int)
def main(json_file: Path | None, ranks: tuple[int, ...]) -> None:
    """Print a table of seconds, bytes and messages."""
    rows: list[Row] = []
    for number in ranks or (1024, 8192, 65_536):
        for part in (meeting, store, checkpoint, files, mesh):
            for row in part(number):
                rows.append(row)
                print(json.dumps(row), flush=True)
    head = ["what", "ranks", "seconds", "bytes a rank", "messages a rank"]
    print(markdown(head, [
        [one["what"], f"{one['ranks']:,}", f"{one['seconds']:.2f}", f"{one['bytes']:,.0f}",
         str(one["messages"])] for one in rows
    ]))  # fmt: skip
    if json_file is not None:
        raw.write(json_file, "scale", rows)


if __name__ == "__main__":
    main()
