"""What `train.causal_lm` cannot do with a model, in words."""

HINT = "leave out loss_chunk_size"
CHANGED_LOGITS = (
    "loss_chunk_size: this model computes something with its logits (caps or scales them, say), so "
    "their loss cannot stand for them"
)
