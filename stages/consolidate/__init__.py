"""Stages that stream named full tensors out of a checkpoint."""
