"""Checked chains of stages, made from a recipe and the installed stages."""
