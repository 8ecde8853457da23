"""Measure this machine, and say what will hurt.

report.py      the Machine: what was found and measured; read_machine
examine.py     fills it: the inventory, and what the measurements told
  host.py, kernel.py, software.py, folders.py, network.py, topology.py, numbers.py  the inventory
  session.py     one measurement after the other, within a time (pace.py)
  ranks.py       processes that measure, with a limit; rank.py is one of them
  together.py    how those that do not exchange anything measure at the same time
  torch_facts.py, matmul.py, copies.py, disk.py, collectives.py           what they do
rules/         Machine -> findings
show.py        the report for people
"""
