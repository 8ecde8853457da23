"""`pipe ARGUMENTS...`, which ends with the process PARENT, however that ends:

python -m pipeline.commands.supervised PARENT ARGUMENTS...
"""

from __future__ import annotations

import sys

from pipeline.cli import main
from pipeline.utils.processes import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    main(sys.argv[2:])
