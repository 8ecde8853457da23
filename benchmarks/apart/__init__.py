"""Measure calls in separate processes: time, processor time, memory, bytes read."""
