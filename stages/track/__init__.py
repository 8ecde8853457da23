"""Trackers: other programs that show runs."""
