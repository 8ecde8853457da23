"""Stages that declare a model."""
