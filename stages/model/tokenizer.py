"""A model's tokenizer, with the chat template that the recipe gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline import StageError
from stages.model import compat
from stages.model.chat_template import read_template, unknown_tokens
from stages.model.gguf import quick_gguf

if TYPE_CHECKING:
    from logging import Logger

    from stages.model.files import Files
    from stages.model.hf import HfModel


def open_tokenizer(files: Files, stage: HfModel, log: Logger) -> Any:
    """Return the transformers tokenizer in some files. Raises StageError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        with compat.quiet(), quick_gguf(files.gguf):
            tokenizer = AutoTokenizer.from_pretrained(
                files.folder,
                gguf_file=files.gguf,
                trust_remote_code=stage.trust_remote_code,
                local_files_only=True,
            )
    except (OSError, ValueError, ImportError, KeyError, IndexError) as error:
        raise StageError(f"the tokenizer in {files} cannot be loaded: {error}") from error
    if stage.chat_template is not None:
        tokenizer.chat_template = read_template(stage.chat_template)
        for token in unknown_tokens(tokenizer.chat_template, tokenizer):
            log.warning(
                "the chat template writes %s, which is no token of the tokenizer: it becomes "
                "several tokens, and generation does not stop at it",
                token,
            )
    return tokenizer
