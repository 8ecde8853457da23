"""Files, text and processes, with nothing about training."""
