"""Operations on files that stages share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

WRITE = 1 << 17
"""Bytes of one call. ext4 and XFS take memory for a call in as large a piece as it has (large
folios); a virtual machine may have given pieces of 2 MiB back to its host, and having them again
takes ten times as long as writing does."""
PAGE = 4096
"""Bytes of a page: disks take whole ones past the system's cache, from whole ones of memory."""

GROUP_FOLDER, GROUP_FILE = 0o2750, 0o640
"""Permissions in a folder that is open to its group, which new files and folders inherit."""
LINK = "is a link, and nothing is written through links"


def expanded(path: str | Path) -> Path:
    """The path with `~` as the home, but for a user that this machine does not have."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (pathlib raises for such a user)


def cache_folder() -> Path:
    """Folder of what can be made again, in the user's (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "pipetrain"


def opened(path: str | Path, mode: str, *, permissions: int = 0o600) -> IO[Any]:
    """A file to write, which only its owner can read if it is new, and the group of a folder that
    is open to one. Raises OSError for a link: in a folder that came from elsewhere it leads to any
    file of ours; and for a pipe or a device."""

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, permissions)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, LINK, str(path)) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ENXIO, "is a pipe or a device, not a file", str(path))
        if permissions == 0o600 and flags & os.O_CREAT:
            let_group(descriptor, Path(name).parent)
        return descriptor

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=opener)


def let_group(place: Path | int, folder: Path) -> None:
    """Open a new folder, or an open file, to the group that the folder which it lies in is open to,
    whatever the umask says."""
    open_to_group = stat.S_ISGID | stat.S_IRGRP  # which new files inherit, and may read
    if folder.stat().st_mode & open_to_group == open_to_group:
        with contextlib.suppress(PermissionError):  # another owner's, who has decided
            os.chmod(place, GROUP_FILE if isinstance(place, int) else GROUP_FOLDER)  # noqa: PTH101


def private_folder(path: Path) -> Path:
    """`path` as a folder of its owner's, and of the group that the folder above is open to, made if
    need be. Raises OSError for a link, and where that folder is gone."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))
    path.mkdir(exist_ok=True, mode=0o700)
    let_group(path, path.parent)
    return path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in system errors of the body: those about an open file do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_text(path: Path, text: str) -> None:
    """Replace the text of a file, as `replace_bytes` does."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Replace the content of a file: a reader sees all of the old or all of the new one. Only its
    owner can read it, unless `mode` has other permissions."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with naming(temporary), opened(temporary, "xb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(content)
    temporary.replace(path)


def remove_folder(path: Path) -> None:
    """Remove a folder as far as that is possible. Anything else at its place stays: to open a named
    pipe, as rmtree does, waits without end."""
    with contextlib.suppress(OSError):  # rmtree ignores some of them only
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def wait_for_lock(file: IO[Any]) -> None:
    """Hold the lock of an open file until it is closed; the system frees the lock of a killed
    process. Where the file system has no locks, no one waits for anybody."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def memory_file(purpose: str, size: int = 0) -> int:
    """A descriptor of a file in memory, which is gone with the last process that has it open."""
    descriptor = os.memfd_create(f"pipe-{purpose}")
    os.truncate(descriptor, size)
    return descriptor


def read_all(descriptor: int) -> bytes:
    """All bytes of an open file, whatever its position."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def check_writable(path: Path) -> None:
    """Raise OSError where a file could not be written, before the work whose result it is for. An
    existing file stays, and no new one is left."""
    new = not path.exists()
    if not new and not path.is_file():  # a pipe's reader would take this for its end
        return
    path.open("ab").close()
    if new:
        path.resolve().unlink()  # what a link leads to


def page_aligned(size: int) -> memoryview:
    """Memory to read into, for `size` bytes, private to this process, at the start of a page. A
    large `bytearray` begins a few bytes after one, and AMD's processors since Zen 3 copy into that
    at a fifth of the speed (https://sourceware.org/bugzilla/show_bug.cgi?id=30994)."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the default is shared with forked processes
    return memoryview(mmap.mmap(-1, max(size, 1), flags=private))[:size]


def read_at(descriptor: int, offset: int, into: memoryview) -> int:
    """Fill `into` from byte `offset` of an open file on; its bytes, fewer where the file ends."""
    done = 0
    while done < len(into) and (count := os.preadv(descriptor, [into[done:]], offset + done)):
        done += count
    return done


def write_at(descriptor: int, offset: int, data: memoryview, *, step: int = WRITE) -> None:
    """Write all of `data` to byte `offset` of an open file, `step` bytes in a call."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + step], offset + done)


def sync_tree(folder: Path) -> None:
    """Force everything in a folder to disk, and the folder itself."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, also after a rename, to disk."""
    with naming(path), contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)
