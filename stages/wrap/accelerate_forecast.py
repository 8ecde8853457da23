"""What a configuration file of accelerate makes of memory."""

from __future__ import annotations

from pathlib import Path

from pipeline.artifacts import Precision
from pipeline.forecast.phases import LOAD
from pipeline.forecast.placement import Placement
from pipeline.forecast.result import Extras, Host
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import Sizes
from pipeline.importing.files import read_config
from stages.wrap.accelerate_checks import KEY, is_handed_on, is_sharded
from stages.wrap.accelerate_handed import HandedOn
from stages.wrap.accelerate_placement import replicated


def forecast(
    path: Path, site: Site, model: ModelShape, precision: Precision, optimizer: OptimizerShape
) -> tuple[Placement, Extras]:
    """Of what is sharded, as the wrap stage which `pipe import` makes of such a file; FSDP has
    whole models in host memory before."""
    content = read_config(path).content
    if not is_sharded(content) and not is_handed_on(content):
        return replicated(site, model, precision, optimizer), Extras()
    stage = HandedOn(path, KEY).stage
    placement: Placement = stage.forecast(site, model, precision, optimizer)
    whole = [_whole(site, model, precision)] if is_sharded(content) else []
    return placement, Extras(host=whole)


def _whole(site: Site, model: ModelShape, precision: Precision) -> Host:
    sizes, local = Sizes.of(precision), min(site.local_ranks, site.ranks)
    held = sum(
        weight.bytes(sizes.compute if weight.borrowed else sizes.master)
        for weight in model.weights()
    )
    return Host(
        phase=LOAD,
        what="models before they are sharded",
        bytes=held * local,
        formula=f"all weights for each of {local} ranks",
    )
