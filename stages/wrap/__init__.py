"""Strategies. Siblings do not import each other; what they share is in files without a strategy's
name."""
