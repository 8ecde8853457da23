"""Runs on two and three hosts, each with one fault: they recover, or fail cleanly, within a
minute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import trials
from tests.support.network import why_not
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
