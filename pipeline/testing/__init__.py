"""Check a stage against the stage contract, and run it in tests.

    from pipeline.testing import assert_conforms, context

    def test_conforms():
        assert_conforms(Sgd, valid={"lr": 0.1}, invalid=[("lr", {"lr": -1.0})])

    def test_run(tmp_path):
        plan = Sgd(lr=0.1).run(context(tmp_path))

Works under any test runner, and imports neither one nor torch.
"""

from __future__ import annotations

from pipeline.testing.conformance import assert_conforms, check_stage, context, plan_view, problems

__all__ = ["assert_conforms", "check_stage", "context", "plan_view", "problems"]
