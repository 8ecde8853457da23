"""Recipes: YAML files, what they extend, and overrides -> one checked `Recipe`."""

from pipeline.distributed.launch import Launch
from pipeline.recipe.load import Header, Recipe, SlotSpec, load_recipe, read_recipe, unless_reported

__all__ = [
    "Header",
    "Launch",
    "Recipe",
    "SlotSpec",
    "load_recipe",
    "read_recipe",
    "unless_reported",
]
