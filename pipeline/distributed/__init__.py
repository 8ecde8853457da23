"""This process among the others: who started it, its rank, its process group, its signals."""
