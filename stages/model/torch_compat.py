"""A private setting of torch's compiler."""

from __future__ import annotations

import torch


def compile_checkpoints_with_casts() -> None:
    """Have torch compile recomputed blocks whose modules a strategy changes and changes back while
    they run (`stages/wrap/compute_cast.py`); by default it compiles no recomputed part that
    assigns to anything."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
