"""Collectives of torch that change their names."""

import torch.distributed as dist

# torch 2.13 renamed these and deprecates the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
