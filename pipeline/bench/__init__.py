"""Short runs of one recipe under several strategies and numbers of processes, compared.

trials.py    the recipe of each run
session.py   the runs, one after another, each in processes of its own
results.py   the numbers of a run, and the arithmetic on them
report.py    table, verdict, JSON and picture

Imports no torch.
"""
