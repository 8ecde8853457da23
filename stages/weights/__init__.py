"""Readers of named tensors: what a file of each kind holds, and views on other readers."""
