"""MachineReport -> findings. A rule that is not told something finds nothing."""

from __future__ import annotations

from pipeline.doctor.report import MachineReport
from pipeline.doctor.rules import environment, gpus, host, measured, software, storage
from pipeline.doctor.rules.finding import SEVERITIES, Finding, Rule

RULES: tuple[Rule, ...] = (
    *software.RULES,
    *gpus.RULES,
    *measured.RULES,
    *host.RULES,
    *environment.RULES,
    *storage.RULES,
)


def findings(machine: MachineReport) -> list[Finding]:
    """All that will hurt, the worst first."""
    found = [finding for rule in RULES for finding in rule(machine)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
