"""The decisions of the process that launches a run, handed over once: ranks, trackers and the plan
made next to a run read no recipe file and check nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan, make_plan
from pipeline.distributed.settings import ProcessCounts
from pipeline.errors import Location
from pipeline.recipe.load import recipe_of
from pipeline.utils.terminal import display


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run, as JSON. Values that depend on environment variables stay as written, so that no
    secret is in it: each process resolves them in its own environment."""

    run_dir: str
    recipe: Mapping[str, Any]
    """The merged recipe's values."""
    last: str
    """The slot after which this start ends."""
    accept: tuple[str, ...] = ()
    """Changes that are intended (`pipe resume --accept`)."""
    warnings: tuple[str, ...] = ()
    """Findings of the checks that are probably mistakes."""
    display: str = ""
    """Words of `pipeline.utils.terminal.set_display` for rank 0."""

    @classmethod
    def of(cls, plan: Plan, run_dir: Path, accept: tuple[str, ...] = ()) -> RunSpec:
        """The spec of a checked plan, cut to what this start does."""
        return cls(
            run_dir=str(run_dir),
            recipe=plan.recipe.public(),
            last=plan.slots[-1].slot,
            accept=accept,
            warnings=tuple(map(str, plan.warnings)),
            display=display(),
        )

    def dump(self) -> str:
        """JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> RunSpec:
        """The reverse of `dump`."""
        facts = json.loads(text)
        return cls(**facts | {key: tuple(facts[key]) for key in ("accept", "warnings")})

    def plan(self, started: ProcessCounts, *, for_this_machine: bool = False) -> Plan:
        """The plan, whose stages are built of the values and not checked again. `for_this_machine`
        asks whether this machine has the GPUs. Raises RecipeError."""
        place = Location(file=f"{self.run_dir}/recipe.yaml")
        recipe = recipe_of(self.recipe, place)
        return make_plan(
            recipe, for_this_machine=for_this_machine, skip_checks=True, started=started
        ).until(self.last)


_current: RunSpec | None = None


def set_current(spec: RunSpec | None) -> None:
    """Note the run that this process is a rank of."""
    global _current
    _current = spec


def current() -> RunSpec:
    """The run that this process is a rank of."""
    assert _current is not None
    return _current
