"""Views of a run for people: its folder, read by other processes than the one that trains."""
