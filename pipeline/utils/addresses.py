"""Addresses such as `s3://bucket/folder`: the only door to fsspec.

fsspec opens far more than stores. Its chains (`simplecache::s3://...`) and protocols such as
`reference`, `github` or `jupyter` read files that name other files, fetch from anywhere, and have
run code that stood in what they read. So what a recipe or a command can name is listed here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from pipeline.errors import Problem, UsageError

PROTOCOLS = (
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "hf", "http", "https",
    "file", "memory",
)  # fmt: skip
"""Protocols that an address can have: object stores, HDFS, the Hugging Face hub, web servers, local
files, and the memory of one process, which is for tests."""


def open_address(address: str, **options: Any) -> tuple[Any, str]:
    """The file system of an address, made with fsspec's `options`, and the place there. Raises
    UsageError for an address that `address_problems` refuses, and what the store's library raises.
    """
    for problem in address_problems("", address):
        raise UsageError(problem.message, hint=problem.hint)
    from fsspec.core import url_to_fs

    system, place = url_to_fs(address, **options)
    return system, str(place)


def address_problems(key: str, text: str | None) -> Iterator[Problem]:
    """The mistake of an address under `key`, without opening it; none for a path."""
    protocol, mark, rest = (text or "").partition("://")
    if not mark:
        protocol, mark, rest = (text or "").partition(":/")
        if mark and protocol in PROTOCOLS:
            meant = f"did you mean {protocol}://{rest.lstrip('/')}?"
            yield Problem(key=key, message=f"{text}: one slash is missing", hint=meant)
        return
    if "::" in protocol or "::" in rest:
        hint = "give the address of the files themselves"
        yield Problem(key=key, message=f"{text}: a chain of file systems is not opened", hint=hint)
    elif protocol not in PROTOCOLS:
        known = ", ".join(f"{each}://" for each in PROTOCOLS)
        lower = protocol.lower()
        hint = f"did you mean {lower}://{rest}?" if lower in PROTOCOLS else f"known: {known}"
        yield Problem(key=key, message=f"{protocol}:// is not opened", hint=hint)
    else:
        from fsspec.registry import known_implementations

        store = known_implementations.get(protocol)
        if store and importlib.util.find_spec(store["class"].partition(".")[0]) is None:
            message = f"{protocol}:// needs a package"
            yield Problem(key=key, message=message, hint=store.get("err", ""))


def path_problems(key: str, text: str | None) -> Iterator[Problem]:
    """The mistake of an address under `key`, where only a path of this machine can stand."""
    protocol, mark, rest = (text or "").partition(":/")
    if mark and (protocol in PROTOCOLS or rest.startswith("/")):
        hint = "give a path; what is written there can be copied to the store afterwards"
        yield Problem(key=key, message=f"{text} is an address, not a path", hint=hint)
