"""The model card's metadata, checked before anything is sent: the hub refuses a commit with a card
that it cannot read."""

from __future__ import annotations

from collections.abc import Iterable

import yaml
from huggingface_hub import ModelCard

from pipeline.errors import StageError
from stages.publish.contents import LocalFile

CARD = "README.md"


def check_card(files: Iterable[LocalFile]) -> None:
    """Raise StageError when the card, if there is one, has metadata that cannot be read."""
    for file in files:
        if file.name == CARD:
            _check(file)


def _check(file: LocalFile) -> None:
    try:
        ModelCard.load(file.path).data.to_yaml()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise StageError(f"{file.path}: its metadata cannot be read: {reason}") from error
