"""Models in memory that write text, for `pipe chat` and `pipe generate`: from a folder, or from
weights that no one has exported."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline import (
    Context,
    ExportError,
    Message,
    ModelSource,
    PipeError,
    StageError,
    TextModel,
    UsageError,
    Weights,
    Writing,
    Written,
    dtype_name,
)
from pipeline.hardware import free_memory
from pipeline.utils import BYTES, activity, human
from stages.adapter.compat import CONFIG as ADAPTER_CONFIG
from stages.adapter.compat import WEIGHTS as ADAPTER
from stages.adapter.compat import import_peft, quiet
from stages.export import target
from stages.export.proof import has_room, loaded, loading
from stages.model import compat
from stages.model.as_exported import AS_SOURCE, module_tensors
from stages.model.assets import aligned, wanted_ids
from stages.model.config_checks import table_of_positions
from stages.model.files import read_json, safetensors_files
from stages.precision.policy import emulates_narrow
from stages.template_limits import Limited


class LoadedModel(TextModel):
    """A model and tokenizer of transformers."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        render: Limited,
        device: torch.device,
        held: contextlib.ExitStack,
    ) -> None:
        """`render` applies the tokenizer's template; `held` keeps what the model reads while it
        runs. Raises UsageError if the model does not fit on the device."""
        with _fitting(device):
            if emulates_narrow(device) and not any(one.is_meta for one in model.parameters()):
                model = model.float()
            elif device.type != "cpu":
                model = model.to(device)
        self._model, self._tokenizer, self._held = model.eval(), tokenizer, held
        self._render, self._device = render, device
        sizes = Counter[torch.dtype]()
        for one in model.parameters():
            sizes[one.dtype] += one.numel()
        self.device, self.dtype = str(device), dtype_name(sizes.most_common(1)[0][0])
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._most = table_of_positions(model.config.get_text_config().to_dict())
        ends = model.generation_config.eos_token_id
        self._ends: set[int | None] = set(ends if isinstance(ends, list) else [ends])
        self._size = sum(one.numel() * one.element_size() for one in model.parameters())

    def answer(
        self, messages: Sequence[Message], how: Writing, show: Callable[[str], object]
    ) -> Written:
        try:
            rendered = self._render(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is a program and may raise anything
            raise StageError(f"the chat template refuses this conversation: {error}") from error
        return self._write(rendered["input_ids"], how, show)

    def continue_text(self, text: str, how: Writing, show: Callable[[str], object]) -> Written:
        return self._write(self._tokenizer(text)["input_ids"], how, show)

    def _write(self, prompt: list[int], how: Writing, show: Callable[[str], object]) -> Written:
        from transformers import TextStreamer

        class Shown(TextStreamer):  # type: ignore[misc]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if text:
                    show(text)

        if not prompt:
            raise StageError("the prompt has no tokens", hint="write a text")
        length = how.max_tokens
        if self._most is not None and len(prompt) >= self._most:
            raise StageError(
                f"the text has {len(prompt)} tokens, and the model has {self._most} positions",
                hint="shorten the prompt; in a chat, /reset drops what was said",
            )
        if self._most is not None:
            length = min(length, self._most - len(prompt))
        # Sampling keeps the other settings of generation_config.json.
        drawing: dict[str, Any] = {"do_sample": True, "temperature": how.temperature}
        if not how.temperature:
            drawing = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        ids = torch.tensor([prompt], device=self._device)
        torch.manual_seed(how.seed)
        with compat.quiet(), torch.no_grad():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                streamer=Shown(self._tokenizer, skip_prompt=True, skip_special_tokens=True),
                **drawing,
            )
        new = output[0, len(prompt) :].tolist()
        text = self._tokenizer.decode(new, skip_special_tokens=True)
        return Written(text=text, tokens=len(new), ended=bool(self._ends & set(new[-1:])))

    def has_room(self) -> bool:
        free = free_memory()
        if self._device.type == "cuda":
            free = min(free, torch.cuda.mem_get_info(self._device)[0])
        return has_room(self._size, free)

    def close(self) -> None:
        self._model = None
        self._held.close()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _renderer(tokenizer: Any) -> Limited:
    """The tokenizer's chat template in its process, which is a copy of this one, so it is made
    before a model is loaded."""
    render = Limited(tokenizer.apply_chat_template, "the model")
    if getattr(tokenizer, "chat_template", None):
        render.start()
    return render


def open_folder(
    folder: Path, ctx: Context, source: ModelSource | None, *, trust_remote_code: bool
) -> LoadedModel:
    """An export, or another folder in Hugging Face layout, as transformers loads it; an adapter on
    the run's model, or on the folder that peft's config names. Raises UsageError for a folder that
    lacks files, or whose weights are pickles, and ExportError where transformers cannot load it."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return _whole(folder, ctx, folder, trust_remote_code=trust_remote_code)
    _looked_over(folder, ctx, has_weights=(folder / ADAPTER).is_file())
    if source is not None:
        under = open_source(ctx, source, AS_SOURCE)
    else:
        named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        base = Path(named) if isinstance(named, str) else Path()
        wrong = ""
        if not (isinstance(named, str) and base.is_dir()):
            wrong = f"{folder} holds only an adapter, and its base ({named}) is not on this machine"
        elif (base / ADAPTER_CONFIG).is_file():
            wrong = f"{folder} is an adapter, and its base ({named}) is one too"
        if wrong:
            hint = "name the run that trained it, or export the whole model: export.safetensors"
            raise UsageError(wrong, hint=hint)
        speaks = folder if (folder / "tokenizer_config.json").is_file() else base
        under = _whole(base, ctx, speaks, trust_remote_code=trust_remote_code)
    peft = import_peft()
    with loading("peft cannot load the adapter"), quiet(), _fitting(ctx.dist.device, folder):
        under._model = peft.PeftModel.from_pretrained(
            under._model, str(folder), autocast_adapter_dtype=False
        ).eval()
    return under


def _whole(folder: Path, ctx: Context, speaks: Path, *, trust_remote_code: bool) -> LoadedModel:
    """The model in a folder, with the tokenizer in `speaks`, whose ends of turns end its texts."""
    from transformers import AutoTokenizer

    files = safetensors_files(folder)  # an index may name anything
    safe = bool(files) and all(file.suffix == ".safetensors" for file in files)
    passed = _looked_over(folder, ctx, has_weights=safe)
    model: Any
    device = ctx.dist.device
    loads = activity(f"loading {folder.name}")
    with contextlib.ExitStack() as stack, loads, _fitting(device, folder):
        with loading(f"the tokenizer in {speaks} cannot be loaded"):
            own = AutoTokenizer.from_pretrained(
                speaks, local_files_only=True, trust_remote_code=trust_remote_code
            )
        render = _renderer(own)
        ends = [] if speaks == folder else wanted_ids(own, len(own))["eos_token_id"]
        model = stack.enter_context(
            loaded(folder, passed, trust_remote_code=trust_remote_code, device=device)
        )
        settings = model.generation_config
        settings.eos_token_id = aligned(settings.eos_token_id, ends, several=True)
        return LoadedModel(model, own, render, device, stack.pop_all())


def _looked_over(folder: Path, ctx: Context, *, has_weights: bool) -> Sequence[str]:
    """Names of the tensors that are passed through. Raises UsageError for an export that lacks
    files, or parts of them, and for a folder without safetensors; warns of one that was changed."""
    written = target.load(folder)
    if written is not None:
        if written.proof is None:
            raise UsageError(f"{folder} is an unfinished export", hint="export it again")
        lost = target.damaged(folder, written)
        if lost:
            raise UsageError(f"{folder} is damaged: {lost}", hint="export it again")
        changes = target.changed(folder)
        if changes:
            ctx.log.warning("%s: %s", folder, changes)
    if not has_weights:
        raise UsageError(
            f"{folder} holds no safetensors files",
            hint="pickles are not read; `pipe export` writes safetensors",
        )
    return written.passed if written else ()


def open_source(
    ctx: Context, source: ModelSource, dtype: str, trained: Weights | None = None
) -> LoadedModel:
    """The source's model in `dtype` of an export, its weights read one after another: `trained`
    ones, adapters merged, or those before training. Raises UsageError where memory has no room for
    them, and StageError if they are not the module's."""
    from transformers import GenerationConfig

    model: Any
    view = source.export_view
    tensors = view.weights() if trained is None else source.merge_trained(trained)
    with contextlib.ExitStack() as stack:
        if tensors is not trained:
            stack.callback(tensors.close)
        tokenizer = view.tokenizer()
        render = _renderer(tokenizer)
        model, own = module_tensors(view, tensors, dtype)
        # It generates as the folder of its export would: ends of turns, cache, attention.
        with tempfile.TemporaryDirectory() as folder, compat.quiet():
            view.save_assets(Path(folder), dtype="fp32")
            model.generation_config = GenerationConfig.from_pretrained(folder)
            use_cache = read_json(Path(folder) / "config.json").get("use_cache", True)
        model.config.use_cache = model.config.get_text_config().use_cache = use_cache
        with contextlib.suppress(ValueError, ImportError):  # as transformers loads a model
            model.set_attn_implementation("sdpa")
        size, free = sum(own.spec(name).nbytes for name in own.names()), free_memory()
        if size > free:
            raise UsageError(
                f"the model takes {human(size)}, and {human(free)} of host memory are free",
                hint="export it: transformers reads the weights of a folder from disk while it "
                "runs",
            )
        with activity(f"reading {Path(view.name).name}", size, BYTES) as reading:
            for name in own.names():
                tensor = own.read(name)
                module, _, leaf = name.rpartition(".")  # the whole model would be walked for each
                part = model.get_submodule(module)
                part.load_state_dict({leaf: tensor}, strict=False, assign=True)
                reading.advance(tensor.numel() * tensor.element_size())
    view.tie(model)
    return LoadedModel(model, tokenizer, render, ctx.dist.device, contextlib.ExitStack())


@contextlib.contextmanager
def _fitting(device: torch.device, folder: Path | None = None) -> Iterator[None]:
    """Raise UsageError for a model that does not fit on the device, and ExportError for whatever
    else transformers raises for an odd `folder`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(f"the model does not fit on {device}", hint="--device cpu") from error
    except Exception as error:
        if folder is None or isinstance(error, PipeError):
            raise
        message = f"{folder} cannot be loaded: {type(error).__name__}: {error}"
        raise ExportError(message) from error
