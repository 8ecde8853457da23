from __future__ import annotations

import sys
from pathlib import Path

# Makes the benchmarks' modules importable; they are in no package.
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
