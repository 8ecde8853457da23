"""Tensor parallelism: ranks share the matrices of every layer."""
