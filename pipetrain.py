"""The installed name of the packages `pipeline` and `stages`, which a user's folder may have too.

`python -m pipetrain` is `pipe`. `python -m pipetrain -m MODULE ARGUMENTS...` runs one of the
project's own modules. Both find the packages that lie beside this file, whatever else the current
folder or PYTHONPATH offers under the same names.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

HOME = str(Path(__file__).resolve().parent)
OWN = ("pipeline", "stages")


class OwnPackages:
    """A finder of `pipeline` and `stages` that knows one place."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the two packages; None for any other module."""
        return PathFinder.find_spec(name, [HOME]) if name in OWN else None


def main() -> None:
    """Run the command line, or the module that follows `-m`."""
    sys.meta_path.insert(0, OwnPackages)
    if sys.argv[1:2] == ["-m"]:
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    from pipeline.cli import main as pipe

    pipe()


if __name__ == "__main__":
    main()
