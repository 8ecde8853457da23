"""The framework: recipes, stages, plans and runs. It imports no stage and names no strategy."""
