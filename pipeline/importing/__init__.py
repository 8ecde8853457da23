"""`pipe import`: other tools' configuration files, translated into a recipe.

The framework reads the files and shows the outcome of every key. Translators, plugins under the
entry-point group `pipe.imports`, know the meaning of the keys.
"""
