"""Implementations of the loss of a linear head, each called in its own process."""
