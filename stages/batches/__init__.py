"""Micro-batches: samples laid out as tensors, padded, cut, and sent to the device that trains."""
