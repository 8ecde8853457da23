"""Formats are found by name and by the content of a folder, and mistakes have clear messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.chain.registry import Entry
from pipeline.checkpoint.formats import Formats, Reading, StateFormat, StateSource
from pipeline.errors import PluginError, UsageError


class One(StateFormat):
    name = "one"

    def detect(self, folder: Path) -> bool:
        return (folder / "one").exists()

    def open(self, folder: Path, reading: Reading) -> StateSource:
        raise NotImplementedError


class Both(One):
    name = "both"

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        return ()


def entry(name: str, attribute: str, distribution: str = "d") -> Entry:
    value = f"{__name__}:{attribute}"
    return Entry(name=name, value=value, distribution=distribution, version="1")


@pytest.fixture
def formats() -> Formats:
    return Formats([entry("one", "One"), entry("both", "Both"), entry("one", "One")])


def test_by_name(formats: Formats) -> None:
    assert formats.names() == ["both", "one"]
    assert formats.get("one").name == "one"
    with pytest.raises(UsageError, match=r"no format `on` \(there are both, one\)"):
        formats.get("on")


def test_by_folder(formats: Formats, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        formats.detect(tmp_path / "nothing")
    with pytest.raises(UsageError, match="no checkpoint of a known format"):
        formats.detect(tmp_path)
    (tmp_path / "one").touch()
    with pytest.raises(UsageError, match=r"could be both, one \(say which with --from\)"):
        formats.detect(tmp_path)


def test_faulty_packages() -> None:
    with pytest.raises(PluginError, match="`one` is registered by d 1 and e 1"):
        Formats([entry("one", "One"), entry("one", "One", "e")]).get("one")
    with pytest.raises(PluginError, match="cannot be loaded: AttributeError"):
        Formats([entry("one", "Nothing")]).get("one")
    with pytest.raises(PluginError, match="is not a StateFormat"):
        Formats([entry("one", "Path")]).get("one")


def test_what_is_installed_here() -> None:
    formats = Formats.installed()
    own = {"canonical", "full", "deepspeed", "dcp", "trainer"}
    assert own <= set(formats.names())
