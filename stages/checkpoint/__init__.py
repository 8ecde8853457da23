"""Stages that save and restore training state."""
