"""Measure this machine, and find what makes training fail or slow."""
