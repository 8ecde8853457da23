"""Models run to the scores of their tokens, and objectives that judge them."""
