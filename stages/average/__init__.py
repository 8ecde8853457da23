"""Stages that keep averages of the weights during a training."""
