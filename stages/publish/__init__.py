"""Stages that put the exported model where others can fetch it."""
