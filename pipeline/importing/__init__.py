"""`pipe import`: other tools' configuration files, translated into a recipe.

The framework reads the files and shows what became of every key. What the keys mean is known to
translators, plugins under the entry-point group `pipe.imports`.
"""
