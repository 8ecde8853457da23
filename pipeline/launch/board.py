"""Encrypted values that the nodes of a run exchange through torch's TCPStore, which node 0 serves
at the address where they meet."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING

from pipeline.distributed.environment import TOKEN
from pipeline.distributed.placement import addresses_of
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CONTACT_SECONDS = 4.0
"""Time limit of one operation of the store."""
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
NONCE = 12
"""Bytes of a value's nonce, which is random (NIST SP 800-38D, 8.2.2)."""


def token(host: str) -> str | None:
    """The secret of the nodes that meet at `host`, without spaces around it; None if there is none,
    and empty where none is needed: on the loopback, which no other machine reaches. Raises
    UsageError if the variable is there and holds nothing, as it does when the file that was to fill
    it is missing."""
    value = os.environ.get(TOKEN)
    if value is not None and not value.strip():
        raise UsageError(f"{TOKEN} is set, but empty", hint="unset it on node 0, which makes one")
    if value is not None:
        return value.strip()
    found = [ip_address(one.partition("%")[0]) for one in addresses_of(host)]
    return "" if found and all(one.is_loopback for one in found) else None


class Board:
    """Sealed texts by name. Who lacks the token can neither read them nor write any."""

    def __init__(self, store: Store, secret: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._store = store
        key = hashlib.sha256(f"pipe board\0{secret}".encode(errors="surrogateescape")).digest()
        self._cipher = AESGCM(key)

    def write(self, name: str, text: str) -> None:
        """Seal a text, for this name only. Bytes of a file's name that are not UTF-8 become
        question marks. Raises RuntimeError (torch's) where the store does not answer."""
        nonce, plain = os.urandom(NONCE), text.encode(errors="replace")
        self._store.set(name, nonce + self._cipher.encrypt(nonce, plain, name.encode()))  # type: ignore[arg-type]

    def read(self, name: str) -> str | None:
        """The text of this name; None if there is none that was sealed with the token. Raises as
        `write` does."""
        there = self._store.check([name])
        return self.opened(name, self._store.get(name)) if there else None

    def read_sealed(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Names that are there, and what they hold, for `opened`. Raises as `write` does."""
        known = list(names)
        if not self._store.check(known):
            known = [name for name in known if self._store.check([name])]
        return zip(known, self._store.multi_get(known) if known else [], strict=True)

    def opened(self, name: str, sealed: bytes) -> str | None:
        """The text; None if it was not sealed with the token for this name."""
        from cryptography.exceptions import InvalidTag

        with contextlib.suppress(InvalidTag, ValueError):
            return self._cipher.decrypt(sealed[:NONCE], sealed[NONCE:], name.encode()).decode()
        return None


def served(host: str, port: int) -> Store:
    """Serve the store, at this address only. Raises UsageError if nothing can listen there, and
    RunFailed while another process does."""
    from pipeline.distributed.process_group import listening

    place = f"node 0 cannot listen at {host}:{port}"
    hint = "--rdzv names an address of node 0 and a port that is free there"
    return connected(host, port, listening(host, port, place, hint).detach())


def connected(host: str, port: int, listener: int | None = None) -> Store:
    """Connect to the store; serve it too at the socket `listener`, if given. Raises RuntimeError
    (torch's) where none answers."""
    given = os.environ.get(LOG_LEVEL)
    if given is None:  # torch reads it once; its stacks of lost connections are not for users
        os.environ[LOG_LEVEL] = "ERROR"
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if given is None:  # ranks have their own
        os.environ.pop(LOG_LEVEL, None)
    limit = datetime.timedelta(seconds=CONTACT_SECONDS)
    store = TCPStore(  # which tries to connect twice, for half of the limit each
        host, port, is_master=listener is not None, wait_for_workers=False, timeout=limit / 2,
        master_listen_fd=listener,
    )  # fmt: skip
    store.set_timeout(limit)
    return store
