"""Stages that declare an optimizer and its schedule."""
