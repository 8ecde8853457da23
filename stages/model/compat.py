"""Names of transformers that are not its documented API, and facts in its source, whose text is
searched and not imported."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stages.weights.converted import Change

# transformers imports torchao where it is installed, whose enumerations torch warns about.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice in the body; its errors still show."""
    from transformers.utils import logging as log

    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have an attribute of a module or class of others be `value` in the body."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def changes_on_load(model: nn.Module, names: Iterable[str]) -> list[Change]:
    """Return the changes that turn tensors of files into the module's, as the architecture declares
    them: older names, a missing or superfluous prefix, stacked experts. Unknown names are
    kept."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")

    targets = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        targets[name] = target, pattern
    return _changes(model, targets, converters, str)


def changes_on_save(model: nn.Module, names: Iterable[str]) -> list[Change]:
    """Return the reverse: the changes that turn the module's tensors into the files'."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    # Whether the files had a prefix that the module lacks is not known.
    kept = [entry for entry in mapping[::-1] if not isinstance(entry, PrefixChange)]
    reverse = [entry.reverse_transform() for entry in kept]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]

    def rename(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    targets = {}
    for name in names:  # the name that the first matching converter returns, and its pattern
        found = (converter.rename_source_key(name) for converter in converters)
        targets[name] = next((one for one in found if one[1] is not None), (rename(name), None))
    return _changes(model, targets, converters, rename)


def _changes(
    model: nn.Module,
    targets: Mapping[str, tuple[str, str | None]],
    converters: Sequence[Any],
    rename: Callable[[str], str],
) -> list[Change]:
    """Changes of names to their `targets`, with the converter's pattern that matched, and a change
    for the tensors that a converter takes together, which have the same target. `rename` is applied
    to the names of its results."""
    from transformers.core_model_loading import dot_natural_key

    from stages.weights.converted import Change, renamed

    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    changes: list[Change] = []
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(targets, key=dot_natural_key):  # experts are stacked in their order
        target, pattern = targets[name]
        if pattern is None:
            changes.append(renamed(name, target))
        else:
            groups.setdefault(target, []).append((name, pattern))

    def convert(target: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(by_pattern[groups[target][0][1]])
        for name, pattern in groups[target]:
            converter.add_tensor(target, name, pattern, tensors[name])
        made = converter.convert(target, model=model, config=model.config)
        return {rename(name): one[0] if isinstance(one, list) else one
                for name, one in made.items()}  # fmt: skip

    return changes + [
        Change(sources=[name for name, _ in members], convert=functools.partial(convert, target))
        for target, members in groups.items()
    ]


def compute_plainly(model: Any) -> None:
    """Compute attention and experts by plain torch operations, which accept all sizes."""
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def block_classes(model: nn.Module) -> Collection[str]:
    """Class names of the modules that the architecture does not want split over devices."""
    return set(getattr(model, "_no_split_modules", None) or ())


def is_remote_code(model: nn.Module) -> bool:
    """Whether the model's class came with the checkpoint."""
    return type(model).__module__.startswith("transformers_modules.")


@functools.cache
def _table(name: str) -> Mapping[str, str]:
    """A table of transformers, which is parsed, as importing it would import torch for seconds."""
    try:
        rest = _source_text("auto/modeling_auto.py").split(f"{name} = OrderedDict(")[1]
        return dict(ast.literal_eval(rest.split("\n)\n")[0].strip()))
    except (IndexError, ValueError, SyntaxError):
        return {}


causal_types = functools.partial(_table, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
"""Returns `model_type` of each causal language model of transformers -> its class."""
image_text_types = functools.partial(_table, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
"""Returns `model_type` of each model that writes text about images -> its class."""


def _source_text(name: str) -> str:
    """Return a file's text among transformers' models, not imported; empty if there is none."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return ""
    try:
        return Path(found.submodule_search_locations[0], "models", name).read_text("utf-8")
    except OSError:
        return ""


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model of more than text, not of its language model."""
    kind, stated = config.get("model_type"), config.get("architectures")
    whole, causal = (table().get(str(kind)) for table in (image_text_types, causal_types))
    if whole is None:
        return False
    chosen = stated[0] if isinstance(stated, list) and stated else causal or whole
    return whole == causal or chosen != causal


def auto_class(config: Mapping[str, Any]) -> str:
    """Name of the class of transformers that loads a model with this config.json."""
    return "AutoModelForImageTextToText" if is_multimodal(config) else "AutoModelForCausalLM"


def masks_of_values(*, packed: bool) -> AbstractContextManager[None]:
    """Make models build the masks of real samples from tensors without values, in the body.

    Without values transformers builds a whole mask, which is right for packed samples; for others
    it is made to look at the values.
    """
    from transformers import masking_utils

    if packed:
        return contextlib.nullcontext()
    return replaced(masking_utils, "is_tracing", lambda *_: False)


def planned_attention() -> str:
    """Return the name of a stand-in for fused attention, which transformers then knows: plans have
    neither its GPU nor values to run it on."""
    from torch.nn import functional
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **given: Any
    ) -> tuple[Tensor, None]:
        """Causal attention of (batch, heads, tokens, size) as (batch, tokens, heads, size)."""
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=given.get("scaling"),
            enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
        sinks = given.get("s_aux")
        if sinks is not None:  # a weight of each head, which gets a gradient and keeps nothing
            out = out + sinks.to(out.dtype).reshape(1, -1, 1, 1)
        return out.transpose(1, 2).contiguous(), None

    name = "planned_fused_attention"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    return name


_BODY = re.MULTILINE | re.DOTALL


@functools.cache
def type_code(kind: str, what: str = "modeling") -> str:
    """Return the source of a type's models or configs; empty if it is not found."""
    whole = kind.replace("-", "_")
    names = (whole, whole.removesuffix("_text"))
    return next(filter(None, (_source_text(f"{name}/{what}_{name}.py") for name in names)), "")


@functools.cache
def _default(kind: str, name: str) -> str:
    """The default of a field in the source of a type's config; empty if it is not found."""
    classes = re.findall(r"^class \w+\(.*?(?=^class |\Z)", type_code(kind, "configuration"), _BODY)
    own = next((one for one in classes if f'model_type = "{kind}"' in one), "")
    stated = re.search(rf"^    {name}: .*?= (\w+)$", own, re.MULTILINE)
    return "" if stated is None else stated[1]


def ties_by_default(kind: str) -> bool | None:
    """Whether head and embedding share their weight by default; None if it is not said."""
    return {"True": True, "False": False}.get(_default(kind, "tie_word_embeddings"))


def size_by_default(kind: str, name: str) -> int | None:
    """Return a size where a config does not state it; None if the type's source states none."""
    stated = _default(kind, name)
    return int(stated) if re.fullmatch(r"\d[\d_]*", stated) else None


@functools.cache
def tied_names(kind: str) -> tuple[str, str] | None:
    """Return the names of the head's weight and of the embedding's, which causal language models of
    a type share if their config says so; None if the source of the type does not say."""
    made = re.search(
        rf"^class {causal_types().get(kind)}\(.*?(?=^class |\Z)", type_code(kind), _BODY
    )
    keys = made and re.search(r'_tied_weights_keys = {"(\S+\.weight)": "(\S+\.weight)"}', made[0])
    return (keys[1], keys[2]) if keys else None


@functools.cache
def attentions(kind: str) -> tuple[str, ...]:
    """Return the attention implementations that a type has, the fastest first, if it says."""
    name = kind.replace("-", "_")
    code = _source_text(f"{name}/modeling_{name}.py")  # models of text and more have others
    if "(PreTrainedModel)" not in code:
        return ()  # its base class, which says it, is in another file
    known = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
    return (*(one for one, flag in known.items() if f"{flag} = True" in code), "eager")


def suited_attention(kind: str, device: str) -> str:
    """Return the fastest attention implementation that a type has and that needs no further
    package; `device`: cuda or cpu, where flex_attention computes no gradients."""
    known = [one for one in attentions(kind) if one != "flex_attention" or device != "cpu"]
    return known[0] if known else "sdpa"
