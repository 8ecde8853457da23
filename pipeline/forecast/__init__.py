"""What a recipe will need on given hardware, by arithmetic alone. Importing this imports no torch.

    site.py        the machines
    shapes.py      what stages tell of models, samples and optimizers
    placement.py   how a strategy takes part in a step: told what happens, it tells a ledger
    net.py         layers, operation by operation, recorded on
    tape.py        forward and backward as autograd runs them
    ledger.py      who holds how much, and the peaks
    chain.py       a recipe's stages, each asked for its forecast
    result.py      what came of it

A stage takes part by a method `forecast(self, site, ...)`, whose further parameters are annotated
with what it needs of the slots before it, as those of `run` are. It gives what it tells, or a tuple
where that is of several kinds. A slot without one is named among a forecast's caveats.
"""
