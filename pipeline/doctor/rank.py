"""One process of a measurement: `python -m pipeline.doctor.rank TARGET FOLDER PARENT SETTINGS`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from pipeline.doctor.ranks import told
from pipeline.errors import in_words
from pipeline.utils import jsonl
from pipeline.utils.process_tree import die_with


def main(target: str, folder: str, parent: str, settings: str) -> None:
    """Call TARGET; leave with exit code 1 and one line if it raises."""
    die_with(int(parent))
    file = told(Path(folder), int(os.environ["RANK"]))
    module, _, function = target.partition(":")
    try:
        measure = getattr(importlib.import_module(module), function)
        measure(json.loads(settings), lambda record: jsonl.append(file, record))
    except Exception as error:
        print(" ".join(in_words(error).split()), file=sys.stderr, flush=True)
        os._exit(1)
    # threads of communication libraries may never end
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
