"""The parts of transformers that are not its documented API, in one place."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice; its errors still show."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The GGUF loader's bar is tqdm's own and heeds no setting of transformers.
    bar = gguf.tqdm
    gguf.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        gguf.tqdm = bar
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def without_init() -> Iterator[None]:
    """Modules constructed inside run no weight initialisation and tie no weights."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


def reshapes_weights(model: nn.Module) -> bool:
    """Whether the tensors of the architecture's files differ from those of the module in more than
    their names (experts stored one by one, fused in the module)."""
    from transformers.core_model_loading import WeightRenaming

    return any(not isinstance(transform, WeightRenaming) for transform in _conversions(model))


def converts_weights(model: nn.Module) -> bool:
    """Whether the architecture's files differ from the module in names or in more."""
    return bool(_conversions(model))


def _conversions(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, add_legacy=False))


def to_file_layout(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names and tensors as the architecture's files have them, from those of the module."""
    from transformers.core_model_loading import revert_weight_conversion

    return cast("dict[str, Tensor]", revert_weight_conversion(model, dict(tensors)))


def initialise(owner: Any, module: nn.Module) -> None:
    """Run the architecture's own initialisation over a module and what is in it, children first."""
    for child in module.children():
        initialise(owner, child)
    owner._init_weights(module)


def declared_ties(model: Any) -> dict[str, str]:
    """Tied name -> the name that files keep, as the architecture declares it."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def block_classes(model: nn.Module) -> Collection[str]:
    """Class names of the modules that the architecture does not want split over devices."""
    return set(getattr(model, "_no_split_modules", None) or ())


def ignorable(model: nn.Module) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Patterns of names that files may lack, and that they may have too much.

    Besides the architecture's own: rotary tables and position indices, which old releases stored.
    """
    missing = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    unexpected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    always = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
    return [re.compile(one) for one in missing], [re.compile(one) for one in (*unexpected, *always)]


def nearest_model(model: nn.Module, name: str) -> nn.Module:
    """The innermost transformers model that the submodule `name` lies in."""
    from transformers import PreTrainedModel

    while name:
        name = name.rpartition(".")[0]
        if isinstance(model.get_submodule(name), PreTrainedModel):
            break
    return model.get_submodule(name)


def is_remote_code(model: nn.Module) -> bool:
    """Whether the model's class came with the checkpoint."""
    return type(model).__module__.startswith("transformers_modules.")
