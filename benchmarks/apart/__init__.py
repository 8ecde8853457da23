"""Measure calls in processes of their own: time, processor time, memory, bytes read."""
