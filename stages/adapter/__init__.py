"""Stages that add trainable parameters to a model that stays as it is."""
