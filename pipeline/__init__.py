"""The framework: recipes, stages, plans and runs. It imports no stage and names no strategy.

Authors of stages import from `pipeline.contracts`, `pipeline.errors` and `pipeline.testing`.
"""
