"""`python -m pipeline` is `pipe`; launchers that start modules need it."""

from __future__ import annotations

from pipeline.cli import main

main()
