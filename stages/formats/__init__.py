"""Formats of training states: our own and those of other tools."""
