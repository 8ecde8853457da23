"""Checkpoints of one training in several formats, and ways to make a model file of them."""
