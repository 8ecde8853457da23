"""Measure training on one GPU: settings in turns with loops by hand, ceilings, saves, a page."""
