"""Checkpoints of one training, and ways to make a model file of them."""
