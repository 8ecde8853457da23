"""Formats of training states: our own and other tools'."""
