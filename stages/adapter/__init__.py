"""Stages that add trainable parameters to a model whose own weights stay fixed."""
