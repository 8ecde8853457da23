"""Become N processes, or one rank of a group that another launcher started."""
