"""Save two checkpoints on file systems of ever larger sizes; prints the result of each second save.

`python -m tests.support.small_disks FOLDER`, in a namespace where this process may mount.
"""

from __future__ import annotations

import subprocess
import sys

from pipeline.checkpoint.store import LocalStore
from tests.support.sweep import Found, look, save
from tests.support.tiny_store import Tiny

PAGE = 4096
FIRST = 22
"""Pages that one checkpoint needs at least, with folders."""


def main(root: str) -> None:
    tiny = Tiny(root)
    for size in range(FIRST, FIRST + 48, 4):
        options = f"size={size * PAGE}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", root], check=True)
        assert save(tiny, 1).problems == ["", ""]
        problems = save(tiny, 2, grace=0.4).problems
        LocalStore(root).clean()  # of files that rank 1 began after rank 0 had given up
        found = look(LocalStore(root), root)
        if any(problems):
            assert found == Found(["step-00000001"], True, []), found
        else:
            assert found == Found(["step-00000001", "step-00000002"], True, []), found
        print("full" if any(problems) else "saved", "; ".join(problems), flush=True)
        subprocess.run(["umount", root], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
