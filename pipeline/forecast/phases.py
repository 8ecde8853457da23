"""Phases of a training, as people read them."""

LOAD, FORWARD, BACKWARD = "load", "forward and loss", "backward"
UPDATE, SAVE, RESUME = "optimizer step", "checkpoint", "resume"
EXPORT, EVALUATION = "export", "evaluation"
