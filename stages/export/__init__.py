"""Stages that write the trained model for others."""
