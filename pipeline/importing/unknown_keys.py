"""Keys of other tools in a recipe: what they are called there, by the installed translators."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

from pipeline.chain.elsewhere import Meant, Slots, shortened
from pipeline.chain.plan import plan_file
from pipeline.errors import PipeError
from pipeline.importing.translator import KeyOutcome, Translators
from pipeline.recipe.nodes import UnknownKey


def of_other_tools(unknown: Sequence[UnknownKey], slots: Slots) -> list[Meant]:
    """Return what each of a recipe's unknown keys means in other tools, which read all of them as
    one file. No hint for a key that no tool has, or that only a whole file explains."""
    installed, names, found = Translators.installed(), [], []
    for each in unknown:  # in the slot of adapter.lora, `r` is `lora_r`
        stage = slots.uses.get(each.slot, "").partition(".")[2]
        own = (each.name, each.name.replace("-", "_"), f"{stage}_{each.name}")
        names.append([*dict.fromkeys(own)])
    pairs = [*zip(unknown, names, strict=True)]
    content = {name: each.value for each, own in pairs for name in own}
    for each, own in pairs:
        advice, outcomes = "", []
        for name, entry in itertools.product(own, installed.names()):
            with contextlib.suppress(PipeError):  # it is the recipe that is at fault
                translator = installed.load(entry)()
                advice = advice or translator.advice(name, each.value)
                outcomes.append(translator.meaning(name, {**content, name: each.value}))
        known = [outcome for outcome in outcomes if outcome is not None]
        to = next((outcome.to for outcome in known if outcome.to), {})
        hint = advice or ("" if to else _reason(each, known))
        found.append(Meant(hint=hint, to=to, sure=bool(advice)))
    return found


def _reason(unknown: UnknownKey, outcomes: Sequence[KeyOutcome]) -> str:
    """Return the hint for a key that no field of a recipe stands for."""
    for outcome in outcomes:
        if outcome.outcome == "default":
            verb = outcome.why.split(" ")[0] in ("is", "has", "changes", "follows")
            why = f"{'it ' if verb else ''}{outcome.why}"
            if unknown.value is None or unknown.value is False:
                why = f"{shortened(unknown.value)} is the default"
            return f"leave it out: {why}"
        if outcome.outcome == "not translated":
            return ": ".join(part for part in (outcome.why, outcome.hint) if part)
    # why a value is refused is about a file of the tool; what to do instead is about the recipe
    return next((one.hint for one in outcomes if one.hint), "")


plan_recipe = functools.partial(plan_file, foreign=of_other_tools)
"""As `plan_file`, of a recipe that a person wrote: hints know the keys of other tools."""
