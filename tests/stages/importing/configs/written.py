"""Configurations as people write them, written to a folder."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.stages.importing.configs.engines import ENGINES
from tests.stages.importing.configs.launch import LAUNCH
from tests.stages.importing.configs.trainer import SCRIPT, TRAINER


def write_configs(folder: Path) -> None:
    """Write every configuration of the modules beside this one as a file below `folder`."""
    for name, content in {**LAUNCH, **ENGINES, **TRAINER}.items():
        as_yaml = name.endswith(".yaml")
        _write(folder / name, yaml.safe_dump(content) if as_yaml else json.dumps(content))
    _write(folder / "trainer/script.yaml", SCRIPT)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
