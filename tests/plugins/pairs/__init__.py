"""Training on pairs: a data stage with columns of its own, and a train stage with another loss."""
