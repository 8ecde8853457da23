"""Stages that turn files into samples."""
