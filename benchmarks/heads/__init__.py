"""Ways to take the loss of a linear head, each called in a process of its own."""
