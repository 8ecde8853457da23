"""Stages that declare dtypes."""
