"""The same training, written by hand without the product: one file for each strategy, one loop."""
