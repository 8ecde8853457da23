"""A recipe's stages on tensors without memory."""
