"""Types that stages give each other and are given; importing them imports no torch.

stage.py, signature.py   a stage, its context, its resources, and what its methods take and return
plan_view.py, traits.py  the slot of each artifact that a stage takes; what stages tell checks
model.py, data.py, optimizer.py   declarations: nothing of them is real yet; readers of tensors
engine.py                the model with its optimizer, on this process's device
training.py, export.py   results, and how far a training has come
sample_order.py          the order in which samples are visited
"""
