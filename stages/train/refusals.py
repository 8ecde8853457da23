"""Words for models and data that `train.causal_lm` cannot use."""

HINT = "leave out loss_chunk_size"
CHANGED_LOGITS = (
    "loss_chunk_size: this model computes something with its logits (caps or scales them, say), so "
    "their loss cannot stand for them"
)
NO_SAMPLES = "needs held-out samples, and there are none"
GIVE_SAMPLES = "give some in the data slot (heldout_fraction or heldout_files)"
