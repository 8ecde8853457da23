"""Stages that declare an optimizer and its schedule, and their base."""

from stages.optimizer.settings import OptimizerSettings as OptimizerSettings
