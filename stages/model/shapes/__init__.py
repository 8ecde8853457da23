"""Architectures as sizes: what a forecast needs of a model, without torch."""
