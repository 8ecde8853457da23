"""This process's place among the run's processes. The only file that starts a process group."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import ipaddress
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.distributed import environment
from pipeline.distributed.environment import LOOPBACK, ON_LOOPBACK, is_single_node, is_worker
from pipeline.distributed.heartbeat import Heartbeat, heartbeats
from pipeline.distributed.signals import Interrupted, StopRequest
from pipeline.errors import RunFailed, StageError, UsageError
from pipeline.utils.text import in_short

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store


Facts = Mapping[str, Any]
"""JSON values by name."""
Place = tuple[int, str]
"""Where a rank runs: the number of its machine, in the order of ranks, and its name."""
SHOWN = 4
"""Differing facts, and nodes or runs of ranks, that a message names."""


def differences(dist: DistContext, facts: Facts) -> list[str]:
    """A sentence for each fact that is not the same on all ranks, with its values and their ranks;
    the same on every rank (collective). Every rank compares its digest with rank 0's, and only
    where one differs are facts exchanged. Nodes that differ in one would train a mixture, and
    nothing would fail."""
    if dist.world_size == 1:
        return []
    text = json.dumps(facts, sort_keys=True, default=str)
    own = hashlib.sha256(text.encode()).hexdigest()
    same = own == dist.broadcast_str(own if dist.is_main else None)
    dist.barrier()  # which waits longer than a collective may
    if not dist.any(not same):
        return []
    every = dist.gather([json.loads(text), dist.local_rank, socket.gethostname()])
    found, local_ranks, hosts = zip(*every, strict=True)
    nodes = itertools.accumulate(int(local == 0) for local in local_ranks)
    places = [(node - 1, host) for node, host in zip(nodes, hosts, strict=True)]
    return list(_differences(found, places))


def _differences(facts: Sequence[Facts], places: Sequence[Place]) -> Iterator[str]:
    for name in dict.fromkeys(name for each in facts for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            ranks.setdefault(json.dumps(each.get(name), sort_keys=True), []).append(rank)
        if len(ranks) > 1:
            values = (
                f"{in_short(json.loads(value))} on {_where(those, places)}"
                for value, those in ranks.items()
            )
            yield f"{name} is {', '.join(values)}"


def _where(ranks: Sequence[int], places: Sequence[Place]) -> str:
    """Ranks in words, with their nodes if there are several."""
    runs = itertools.groupby(enumerate(ranks), key=lambda place: place[1] - place[0])
    edges = ([rank for _, rank in run] for _, run in runs)
    spans = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in edges]
    nodes = dict.fromkeys(places[rank] for rank in ranks)
    where = in_one([f"node {node}, {host}" for node, host in nodes])
    where = f" ({where})" if places[-1][0] > 0 else ""
    return f"rank{'s' * (len(ranks) > 1)} {in_one(spans, ', ')}{where}"


def in_one(found: Sequence[str], between: str = "; ") -> str:
    """Differences as one text; those after the first few are counted."""
    more = f"{between}and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return between.join(found[:SHOWN]) + more


LONG_WAIT = datetime.timedelta(hours=24)
"""Timeout of waits on work of unknown length (tokenising a corpus, exporting a model). A dead peer
ends them early: the launcher stops the whole run."""
LEAVING = datetime.timedelta(seconds=5)
"""Longest wait of the rank that serves the store for those that still read it."""
RENDEZVOUS_SECONDS = 600.0
"""Seconds to wait for the other ranks before the recipe, which may give another time, is known."""

QUICK_LOOKS = 50
"""Looks, a millisecond apart, for a key in a file."""
PIECE = 1 << 20
"""Characters of one value in the store. torch's server drops the connection of a client that sends
more than a few MiB at once."""

_CALLS = itertools.count()
"""Every rank makes the same calls in the same order, so counting them yields common keys."""


@dataclass(kw_only=True)
class DistContext:
    """Rank, world and device of this process; every wait between processes goes through here."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device
    store: Store | None = None
    """Key-value store of the run; None exactly when there is one process and no group."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat, repr=False)
    """This rank's signs of life. Work that takes minutes shows one now and then."""
    stop: StopRequest = field(default_factory=StopRequest, repr=False)
    """Signals that ask this process to end. They end it at once, except where a stage defers them
    to keep what it has done."""
    _spent: list[str] = field(default_factory=list, init=False, repr=False)
    """Keys that rank 0 may delete once every rank has come to a later call."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes shared files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks, however long: by the store, so no collective times out."""
        if self.store is None or self.world_size == 1:
            return
        key = f"pipe/barrier/{next(_CALLS)}"
        opened = f"{key}/open"
        if self.store.add(key, 1) == self.world_size:
            self.store.set(opened, "1")
        with self.heartbeat.waiting():
            receive(self.store, opened)
        for spent in self._spent if self.is_main else ():  # all ranks have left earlier calls
            self.store.delete_key(spent)
        self._spent[:] = [key, opened]

    def broadcast_str(self, value: str | None) -> str:
        """Rank 0's text, on every rank. Other ranks pass None."""
        if self.store is None or self.world_size == 1:
            assert value is not None
            return value
        key = f"pipe/share/{next(_CALLS)}"
        self._spent.append(key)
        if self.is_main:
            assert value is not None
            pieces = [value[at : at + PIECE] for at in range(0, len(value), PIECE)]
            for number, piece in enumerate(pieces):
                self.store.set(f"{key}/{number}", piece)
                self._spent.append(f"{key}/{number}")
            self.store.set(key, str(len(pieces)))
            return value
        with self.heartbeat.waiting():
            count = int(receive(self.store, key))
            return "".join(receive(self.store, f"{key}/{number}") for number in range(count))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank (collective)."""
        return [*map(json.loads, self.collect(json.dumps(value).encode(), everywhere=True))]

    def collect(self, value: bytes, *, everywhere: bool = False) -> list[bytes]:
        """Every rank's bytes, in rank order, on rank 0, or `everywhere`; nothing on the others
        (collective)."""
        import torch
        import torch.distributed as dist

        if self.world_size == 1:
            return [value]
        self.barrier()  # which waits longer than a collective may
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(value)]))
        sizes = [int(length) for length in lengths]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in sizes] if everywhere or self.is_main else []
        if everywhere:
            dist.all_gather(found, mine)
        else:
            dist.gather(mine, found or None, dst=0)
        found.reverse()  # each is freed as soon as it is copied
        return [found.pop()[:size].numpy().tobytes() for size in sizes if found]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank (collective)."""
        import torch
        import torch.distributed as dist

        if self.world_size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def require_same(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise StageError on every rank if any fact, a JSON value, is not the same on all ranks:
        it names the differing facts, their values, and on which ranks and machines (collective).
        Nodes that differ would train a mixture, and nothing else would notice."""
        found = differences(self, facts)
        if found:
            raise StageError(
                f"the ranks of this run do not have the same {what}: {in_one(found)}",
                hint="give every machine the same files, or a folder that all of them share",
            )

    @contextlib.contextmanager
    def rank0_first(self) -> Iterator[bool]:
        """Rank 0 runs the body first, the others after it has finished; yields whether this is
        rank 0.

        For work whose result is a file: rank 0 makes it, the others find it. When rank 0 raises,
        the others wait until its end is noticed and the launcher stops them.
        """
        if not self.is_main:
            self.barrier()
        yield self.is_main
        if self.is_main:
            self.barrier()


def leave(dist: DistContext, kind: type[BaseException] | None = None, *_: object) -> None:
    """End this rank's use of a store that rank 0's process may serve, as a context exits: with an
    error or without. Rank 0 waits for the others, which may still read that the last barrier is
    over; not after an error."""
    assert dist.store is not None
    with contextlib.suppress(RuntimeError):  # of torch: who served it has gone
        if dist.store.add("pipe/left", 1) == dist.world_size:
            dist.store.set("pipe/left/all", "1")
        if dist.is_main and (kind is None or issubclass(kind, Interrupted)):
            dist.store.wait(["pipe/left/all"], LEAVING)


def receive(store: Store, key: str) -> str:
    """The text under `key`, as soon as another rank has set it. In a file, which ranks of one
    machine share, torch looks every 10 ms only, while most others come within a few."""
    own = environment.shared
    looks = QUICK_LOOKS if own and own.store is not None else 0
    while looks and not store.check([key]):
        time.sleep(0.001)
        looks -= 1
    if not looks:
        store.wait([key], LONG_WAIT)
    return bytes(store.get(key)).decode()


def environment_store(seconds: float = RENDEZVOUS_SECONDS, job: str = "") -> Store | None:
    """Meet the ranks that the launcher's environment describes: in a file if it was `pipe` on one
    machine, else at MASTER_ADDR and MASTER_PORT (torchrun's variables). None when there is no
    launcher. Waits at most `seconds` for the others. Ranks of another `job` of a scheduler, whose
    port happens to be the same, do not meet the ranks of this one."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    timeout = datetime.timedelta(seconds=seconds)
    own, world_size = environment.shared, int(os.environ.get("WORLD_SIZE") or 1)
    if own is not None and own.store is not None:
        store = FileStore(f"/proc/self/fd/{own.store}", world_size)
        store.set_timeout(timeout)
        return store
    if not is_worker():
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if environment.ROUND in os.environ:  # the store of the nodes, which outlives rounds
        joined = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore(os.environ[environment.ROUND], joined)
    # of their job, and of this one of torchrun's starts, whose own store outlives its ranks
    keys = f"{job}/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        place = f"rank 0 cannot listen at MASTER_ADDR={host} and MASTER_PORT={port}"
        hint = "give an address of the machine that rank 0 runs on"
        with listening(host, port, place, hint) as server:  # else torch listens at every address
            address = server.getsockname()[0]
            # bound to the loopback by the launcher, as where all nodes are this machine
            stays_here = is_single_node() or os.environ.get("GLOO_SOCKET_IFNAME") == LOOPBACK
            if ipaddress.ip_address(address).is_loopback and not stays_here:
                raise UsageError(
                    f"{place}: that is {address} here, which other machines do not reach",
                    hint="name an address that they reach, or set LOCAL_WORLD_SIZE if all is here",
                )
            served = TCPStore(
                host, port, world_size=world_size, is_master=True, timeout=timeout,
                master_listen_fd=server.detach(),
            )  # fmt: skip
        return PrefixStore(keys, served)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(keys, store)


def listening(host: str, port: int, place: str, hint: str) -> socket.socket:
    """A socket that listens at this address only. Raises UsageError, with `place` as its first
    words, where none can, and RunFailed while another process has the port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another start has another port
            raise RunFailed(f"{place}: {error.strerror}", restart="always") from error
        raise UsageError(f"{place}: {error.strerror}", hint=hint) from error


def environment_dist(
    store: Store | None, *, device: str, timeout: float | None = None
) -> DistContext:
    """Start the process group of the ranks that meet in `store`, from `environment_store`.

    `device` is `cpu` or `cuda`; `timeout` is the time limit of a collective in seconds, by default
    torch's. A group is started for one process too, because strategies need one. Where all are on
    this machine, no other can connect to them.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    if is_single_node():  # also what is left of several nodes
        os.environ |= ON_LOOPBACK
    group = os.environ if store is not None else {}
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    numbers = (int(group.get(name, alone)) for name, alone in names.items())
    rank, world_size, local_rank, local_world_size = numbers
    place, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        place, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
    common = store if store is not None else dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=PrefixStore("group", common),
        rank=rank,
        world_size=world_size,
        device_id=place if device == "cuda" else None,
        timeout=None if timeout is None else datetime.timedelta(seconds=timeout),
    )
    own = environment.shared
    return DistContext(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size,
        device=place, store=common,
        heartbeat=heartbeats(own.heartbeats)[own.number] if own else Heartbeat(),
    )  # fmt: skip
