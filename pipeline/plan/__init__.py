"""From a recipe and the installed stages to a checked chain."""
