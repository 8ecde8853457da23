"""What a node does when it hears nothing of node 0."""

from __future__ import annotations

from types import SimpleNamespace as Record
from typing import Any

import pytest

from pipeline.distributed.settings import Timeouts
from pipeline.launch.agent import SILENCE, Agent, _RoundOverError
from pipeline.launch.messages import Beat, Place, Reply
from pipeline.recipe import Launch
from pipeline.view.screen import Screen

BEAT = Beat(agent="x", run="r", node=1, host="h", procs=1, port=1)
PLACE = Place(first_rank=1, world_size=2, nodes=2, master="m", port=1)


@pytest.mark.parametrize(("own", "of_node_0"), [(3, 60), (60, 3), (10, 10)])
def test_node_0_says_how_long_it_may_be_silent(own: float, of_node_0: float) -> None:
    """A node with another value would end its ranks while the others wait for them."""
    settings: Any = Launch(timeouts=Timeouts(node=own))
    plan: Any = Record(recipe=Record(launch=settings, name="r"))
    node: Any = Record(host="m", port=1, node_rank=1, job="")
    agent = Agent(plan, node, lambda: None, Screen())
    reply = Reply(round=1, place=PLACE, lost_seconds=of_node_0)
    ranks: Any = Record(landmarks=lambda: 0)

    def obey(silence: float) -> None:
        link: Any = Record(beat=BEAT, reply=reply, silent_for=lambda: silence)
        agent._obey(link, reply, ranks, None)

    obey(SILENCE * of_node_0 - 0.1)
    with pytest.raises(_RoundOverError, match=f"no answer for {SILENCE * of_node_0:g} s"):
        obey(SILENCE * of_node_0 + 0.1)
