"""Measure this machine, and say what will hurt.

report.py      the Machine: what was found and measured; read_machine
examine.py     fills it: the inventory, then the measurements, each in processes of its own
  host.py, kernel.py, software.py, folders.py, network.py, topology.py    the inventory
  ranks.py       processes that measure, with a limit; rank.py is one of them
  torch_facts.py, matmul.py, copies.py, disk.py, collectives.py           what they do
rules/         Machine -> findings
show.py        the report for people
"""
