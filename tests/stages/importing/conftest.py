"""Configuration files, and a model for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.stages.importing.support import CONFIGS
from tests.support.models import save_tokenizer, tiny_llama_config


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of `configs/`."""
    return Path(shutil.copytree(CONFIGS, tmp_path_factory.mktemp("configs") / "configs"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama with a tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.for_model(**tiny_llama_config())
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
