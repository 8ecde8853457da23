"""Facts that all ranks of a run must share: the recipe, and the model and data of its slots."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.contracts.data import Data
from pipeline.contracts.model import ModelSource
from pipeline.distributed.agreement import differences, in_one
from pipeline.utils.packages import versions

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.contracts.stage import Context

A_PATH = "a path"


def require_same_recipe(plan: Plan, ctx: Context) -> None:
    """Raise StageError if the ranks have other recipes, defaults of stages or versions of packages
    (collective).

    Absolute paths may differ, which is logged: machines may keep files in different places, and
    what lies there is compared when it is opened. So may `launch`: how a machine starts."""
    recipe = plan.recipe
    written = recipe.public()["stages"]
    facts: dict[str, Any] = {
        "order of slots": ", ".join(planned.slot for planned in plan.slots), "name": recipe.name,
        "seed": recipe.seed, "dry_run": recipe.dry_run,
    }  # fmt: skip
    for planned in plan.slots:
        facts[f"{planned.slot}.use"] = planned.use
        facts |= _leaves(planned.slot, dataclasses.asdict(planned.stage), written.get(planned.slot))
    facts |= {f"version of {package}": version for package, version in versions().items()}
    paths = {name: value for name, value in facts.items() if _is_path(value)}
    ctx.dist.require_same("recipe and packages", {**facts, **dict.fromkeys(paths, A_PATH)})
    apart = differences(ctx.dist, paths)
    if apart:
        ctx.log.warning(
            "ranks have files in different places; the model, adapters, data and the "
            "tokenizer are compared: %s",
            in_one(apart),
        )


def require_same_artifact(artifact: Any, ctx: Context) -> None:
    """Raise StageError if a model or data differ between ranks (collective)."""
    if isinstance(artifact, ModelSource):
        sampled = artifact.sampled_contents
        facts = {"its architecture and files": artifact.fingerprint}
        ctx.dist.require_same("model", facts if sampled is None else {**facts, "weights": sampled})
        what = "size, header and a piece of every tensor" if sampled else "settings and seed"
        compared = f"the model's config, and of its weights {what}"
    elif isinstance(artifact, Data):
        ctx.dist.require_same("data", artifact.identity)
        compared = "the data"
    else:
        return
    if ctx.dist.world_size > 1:
        ctx.log.debug("all %d ranks have the same: %s", ctx.dist.world_size, compared)


def _leaves(name: str, value: Any, written: Any) -> Iterator[tuple[str, Any]]:
    """Every field in a value, defaults too. What depends on an environment variable, and may be a
    secret, is not shown."""
    if isinstance(written, str) and "${" in written and not _is_path(value):
        text = json.dumps(value, sort_keys=True, default=str)
        yield name, f"{written} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
    elif isinstance(value, Mapping) and value:
        below = written if isinstance(written, Mapping) else {}
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part, below.get(key))
    elif isinstance(value, list | tuple) and value:
        every = written if isinstance(written, list | tuple) else []
        pairs = itertools.zip_longest(value, every[: len(value)])
        for number, (part, one) in enumerate(pairs):
            yield from _leaves(f"{name}.{number}", part, one)
    else:
        yield name, value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "~"))
