"""Addresses of checkpoints outside of the file system."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from pipeline.errors import Problem


def unknown_address(key: str, address: str | None) -> Iterator[Problem]:
    """The mistake, if nothing that is installed knows the address; imports no store's library."""
    protocol, mark, _ = (address or "").partition("://")
    if not mark:
        return
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol)
    if known is None:
        yield Problem(
            key=key,
            message=f"fsspec knows no {protocol}://",
            hint="a path, or an address such as s3://bucket/folder",
        )
    elif importlib.util.find_spec(known["class"].partition(".")[0]) is None:
        hint = known.get("err", "")
        yield Problem(key=key, message=f"{protocol}:// needs a package", hint=hint)
