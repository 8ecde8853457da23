"""Measure this machine, and find what makes training fail or slow.

examine.py       fills the MachineReport of report.py, from
  inventory.py, software.py, gpu_topology.py     facts that are looked up
  session.py     measurements within a time budget, each in processes of its own (ranks.py):
                 measurements.py and collectives.py, timed by timing.py
rules.py         finds what is wrong in a report, with the advice of findings.toml
show.py          prints the report
"""
