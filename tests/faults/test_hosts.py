"""Runs on two and three hosts, each with one fault: they recover, or fail cleanly, within a
minute."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.distributed.environment import TOKEN
from tests.support import trials
from tests.support.models import tiny_llama_config
from tests.support.network import Host, network, why_not
from tests.support.pipe import Pipe
from tests.support.trials import STEPS, Ended, write_recipe

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

FAULTS = (
    trials.lose_worker, trials.lose_agent, trials.come_back, trials.freeze, trials.cut_link,
    trials.cut_link_for_a_minute,
)  # fmt: skip
REPEATS = 2
CASES = [(fault, hosts, seed) for seed in range(REPEATS) for hosts in (2, 3) for fault in FAULTS]


@pytest.fixture(scope="module")
def calm(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """Return the weights of an undisturbed run on as many processes of one machine."""
    known: dict[int, bytes] = {}

    def weights(procs: int) -> bytes:
        if procs not in known:
            folder = tmp_path_factory.mktemp("calm")
            pipe = Pipe(plugin, folder, starts=True)
            assert pipe.run(write_recipe(folder, procs=procs)).code == 0
            known[procs] = (pipe.run_dir / "export" / "model.safetensors").read_bytes()
        return known[procs]

    return weights


def check(ended: Ended) -> None:
    """Check what is so of every end."""
    assert None not in ended.codes, ended.said
    assert ended.left == 0
    assert ended.seconds < trials.LIMIT
    assert ended.steps == list(range(1, len(ended.steps) + 1)), ended.said
    assert "Traceback" not in ended.said


@pytest.mark.full
@pytest.mark.parametrize(("fault", "hosts", "seed"), CASES)
def test_a_run_recovers_bit_for_bit(
    pipe: Pipe,
    calm: Callable[[int], bytes],
    fault: Callable[..., None],
    hosts: int,
    seed: int,
) -> None:
    ended = trials.trial(pipe.folder, fault, seed, pipe.environment, hosts=hosts, rendezvous=90)
    check(ended)
    assert ended.codes == [0] * hosts, ended.said
    assert len(ended.steps) == STEPS
    assert ended.weights == calm(hosts)


@pytest.mark.full
def test_a_host_that_is_gone_ends_a_run_that_needs_it(pipe: Pipe) -> None:
    ended = trials.trial(pipe.folder, trials.lose_host, 0, pipe.environment)
    check(ended)
    assert ended.codes == [1, -9]
    assert ended.said.endswith(")\n  to continue, start the same command again on every node\n"), (
        ended.said
    )


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_stop_of_one_process_stops_all_and_loses_no_step(
    pipe: Pipe, calm: Callable[[int], bytes], seed: int
) -> None:
    ended = trials.trial(pipe.folder, trials.ask_to_stop, seed, pipe.environment)
    check(ended)
    assert ended.codes == [75, 75], ended.said
    run = pipe.folder / "run"
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-????????"))
    assert int(saved[-1].removeprefix("step-")) == ended.steps[-1]
    result = pipe("run", str(write_recipe(pipe.folder, procs=2)), "--run-dir", str(run))
    assert result.code == 0, result.stderr
    assert (run / "export" / "model.safetensors").read_bytes() == calm(2)


def disturb(hosts: list[Host], stop: threading.Event) -> int:
    """Send garbage and half messages to every port that is listened to, from another machine, and
    keep the connections; return how many were made."""
    kept: list[subprocess.Popen[str]] = []
    while not stop.wait(0.5):
        for host in hosts[:-1]:
            for port in host.ports():
                sent = random.choice([b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 9999, b"\0\0", b""])
                program = SENDER.format(address=host.address, port=port, sent=sent)
                command = [sys.executable, "-S", "-c", program]
                with Path(os.devnull).open("w") as nothing:
                    kept.append(hosts[-1].start(command, os.environ, nothing))
        if len(kept) > 60:
            break
    stop.wait()
    for process in kept:
        process.kill()
        process.wait()
    return len(kept)


SENDER = """
import socket, time
with socket.create_connection(("{address}", {port}), timeout=5) as stranger:
    stranger.sendall({sent!r})
    time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.parametrize("hosts", [2, 3])
def test_strangers_end_no_run(pipe: Pipe, calm: Callable[[int], bytes], hosts: int) -> None:
    """The last machine of the network is none of the run's."""
    with network(hosts + 1) as made:
        cluster = trials.Cluster(made[:-1], write_recipe(pipe.folder), pipe.environment)
        stop, sent = threading.Event(), list[int]()
        work = threading.Thread(target=lambda: sent.append(disturb(made, stop)))
        work.start()
        cluster.wait_for_step(3)
        cluster.disturbed = time.monotonic()
        ended = cluster.end()
        stop.set()
        work.join()
    check(ended)
    assert sent[0] > 10
    assert ended.codes == [0] * hosts, ended.said
    assert ended.weights == calm(hosts)


FORGER = """
import time
from pipeline.launch.board import Board, connected
store = connected("{address}", {port})
board = Board(store, "another")
for _ in range(60):
    keys = (key.removeprefix("/") for key in store.list_keys())
    for name in ("orders", "hello/1", "node/1", *(key for key in keys if key.startswith("spec/"))):
        board.write(name, '{{"session": "x", "over": {{"kind": "stopped"}}}}')
        store.set("greeting/1", store.get(name))
    print("forged", flush=True)
    time.sleep(1)
"""


@pytest.mark.full
def test_forged_orders_and_states_end_no_run(pipe: Pipe, calm: Callable[[int], bytes]) -> None:
    with network(3) as made:
        cluster = trials.Cluster(made[:2], write_recipe(pipe.folder), pipe.environment)
        program = FORGER.format(address=made[0].address, port=trials.PORT)
        with (pipe.folder / "forger").open("w") as said:
            command = [sys.executable, "-c", program]
            forger = made[2].start(command, pipe.environment, said)
        cluster.wait_for_step(3)
        cluster.disturbed = time.monotonic()
        ended = cluster.end()
        forger.kill()
        forger.wait()
    check(ended)
    assert (pipe.folder / "forger").read_text().count("forged") > 5
    assert ended.codes == [0, 0], ended.said
    assert ended.weights == calm(2)


@pytest.mark.full
@pytest.mark.parametrize("given", ["another", None])
def test_who_has_no_token_or_another_joins_nothing(
    pipe: Pipe, calm: Callable[[int], bytes], given: str | None
) -> None:
    """Beside the run's nodes a third comes under the rank of one of them."""
    with network(3) as made:
        cluster = trials.Cluster(made[:2], write_recipe(pipe.folder), pipe.environment)
        cluster.hosts = made
        cluster.wait_for_step(3)
        cluster.start(2, "--node-rank", "1", **{TOKEN: given})
        cluster.disturbed = time.monotonic()
        code = cluster.agents.pop(2).wait(trials.LIMIT)
        said = cluster.said(2).read_text()
        cluster.hosts = made[:2]
        ended = cluster.end()
    check(ended)
    assert ended.codes == [0, 0], ended.said
    assert ended.weights == calm(2)
    assert code == (2 if given is None else 1), said
    assert TOKEN in said
    assert "tiny" not in said.replace(str(pipe.folder), "")


@pytest.mark.full
@pytest.mark.parametrize("late", [(0,), (1,), (0, 2)])
def test_nodes_that_start_late(
    pipe: Pipe, calm: Callable[[int], bytes], late: tuple[int, ...]
) -> None:
    hosts = max(late) + 2 if 0 in late and len(late) == 1 else max(2, max(late) + 1)
    with network(hosts) as made:
        cluster = trials.Cluster(made, write_recipe(pipe.folder), pipe.environment, late=late)
        time.sleep(12)
        for number in late:
            cluster.start(number)
        cluster.wait_for_step(1)
        cluster.disturbed = time.monotonic()
        ended = cluster.end()
    check(ended)
    assert ended.codes == [0] * hosts, ended.said
    assert ended.weights == calm(hosts)


@pytest.mark.full
@pytest.mark.parametrize("change", ["optimizer.lr=0.3", "train.steps=41"])
def test_another_recipe_on_a_node_ends_the_run_with_both_machines(pipe: Pipe, change: str) -> None:
    with network(2) as made:
        cluster = trials.Cluster(made, write_recipe(pipe.folder), pipe.environment, late=[1])
        cluster.start(1, change)
        cluster.disturbed = time.monotonic()
        ended = cluster.end()
    assert ended.codes == [1, 1], ended.said
    assert f"node 1 ({made[1].name}): this node's recipe is not node 0's: " in ended.said
    assert f"on node 0 ({made[0].address})" in ended.said
    assert ended.steps == []


@pytest.mark.full
def test_other_weights_on_a_node_end_the_run_with_both_machines(pipe: Pipe) -> None:
    """Both have a model at the same place of their own."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama_config()))
    for number in range(2):
        model.save_pretrained(pipe.folder / f"model-{number}")
        with torch.no_grad():
            model.model.norm.weight += 0.1
    recipe = write_recipe(pipe.folder)
    content = json.loads(recipe.read_text())
    content["stages"]["model"] = {"use": "model.hf", "path": "${oc.env:MODEL}"}
    recipe.write_text(json.dumps(content | {"env": ["MODEL"]}))
    with network(2) as made:
        cluster = trials.Cluster(made, recipe, pipe.environment, late=[0, 1])
        for number in range(2):
            cluster.start(number, MODEL=str(pipe.folder / f"model-{number}"))
        cluster.disturbed = time.monotonic()
        ended = cluster.end()
    assert ended.codes == [1, 1], ended.said
    assert "do not have the same model: " in ended.said
    for number, host in enumerate(made):
        assert f"on rank {number} (node {number}, {host.name})" in ended.said
    assert ended.steps == []
