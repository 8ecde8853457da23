"""The canonical checkpoint: one layout whatever the strategy and the world size.

    step-00000020/
      manifest.json             contents, places, checksums
      rank-00000.safetensors    the parts of tensors that this rank wrote
      rank-00000.sums           their block checksums

A logical tensor has a key `KIND/NAME` (`weight/model.norm.weight`, `exp_avg/...`, `random/...`) and
is stored as pieces: contiguous ranges of its row-major flattening. Pieces of a tensor are disjoint
and cover it, whoever wrote them; any range of it can be read and verified alone.
"""
