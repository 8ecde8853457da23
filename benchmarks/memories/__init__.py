"""Trainings whose memory is compared, and the comparison."""

DRAWN = "drawn "
"""Beginning of a random model's name."""
