"""The same training, written by hand without the product: one file a strategy, one loop."""
