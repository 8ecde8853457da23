"""Stages that keep averages of the weights beside a training."""
