"""Recipes: YAML files, what they extend, and overrides -> one checked `Recipe`."""

from pipeline.distributed.settings import Launch
from pipeline.recipe.load import (
    Recipe,
    RecipeSettings,
    SlotSpec,
    load_recipe,
    read_recipe,
    unless_reported,
)

__all__ = [
    "Launch",
    "Recipe",
    "RecipeSettings",
    "SlotSpec",
    "load_recipe",
    "read_recipe",
    "unless_reported",
]
