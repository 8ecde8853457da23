"""What of an engine's state is its own, and not its model source's."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from pipeline.engine import Engine, EngineState


def own_state(engine: Engine, borrowed: Set[str]) -> EngineState:
    """The engine's state without the parameters that are `borrowed` from the model's source."""
    state = engine.state()
    return dataclasses.replace(
        state,
        shapes={name: shape for name, shape in state.shapes.items() if name not in borrowed},
        aliases={name: kept for name, kept in state.aliases.items() if kept not in borrowed},
        frozen=[name for name in state.frozen if name not in borrowed],
    )
