"""The actual model and engine, run on tensors without memory. Importing this imports no torch.

    watch.py           what stages are told of a trace, and tell of it
    meter.py           who holds how much, and the peak of every moment
    group_compat.py    a process group of any size in which nothing is sent
    watch_compat.py, autograd_compat.py, fake_compat.py
                       what torch does when it is watched, what otherwise, and without values
    session.py         the surroundings: group, tensors without values, meter
    training.py        which stages train
    structure.py       a model's blocks, and the shallower model that stands for it
    run.py             a recipe's stages, run as far as training steps
    alone.py           the model without a strategy, for those that cannot be traced
    replay.py          its numbers as a story, for a strategy's arithmetic
    extrapolate.py     from two depths to the real one
    level.py           a forecast made of all that
    measured.py        two real steps on this machine; rank.py is one process of them
    gpu.py             ... and what torch's allocator says

A stage takes part by a method `trace(self, ctx, ...)`, whose further parameters are annotated as
those of `run` are, and may ask for `Site`, `SampleShape`, `Depth` and `Watch` too. Without one,
stages that give a ModelSource, Precision or OptimizerPlan are run: those are declarations. A wrap
stage's gives an engine that needs no values, or None where only its arithmetic can tell.
"""
