"""Stages that measure an exported model."""
