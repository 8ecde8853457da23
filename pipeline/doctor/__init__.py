"""Measure this machine, and find what makes training fail or slow.

examine.py       fills the MachineReport of report.py, from
  inventory.py, software.py     facts that are looked up
  measurements.py               facts that are measured, by processes of ranks.py
rules.py         finds what is wrong in a report, with the advice of findings.toml
show.py          prints the report
"""
