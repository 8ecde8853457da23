from __future__ import annotations

import sys
from pathlib import Path

# Modules of benchmarks, which are no part of any package, can be imported.
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
