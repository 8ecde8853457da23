"""Short runs of one recipe under several strategies and numbers of processes, compared.

    trials.py    the recipe of each run
    slots.py     its slots
    session.py   all runs, one after another
    measure.py   one run in a process of its own, and what its folder tells
    child.py     that process
    results.py   numbers of one run; what follows from several
    record.py    the same as JSON
    verdict.py   the same in words
    table.py     the same in columns
    plot.py      the same as a picture
    report.py    all of these, on screen and in files

Imports no torch.
"""
