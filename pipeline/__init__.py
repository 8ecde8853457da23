"""The framework: recipes, stages, plans and runs. It imports no stage and names no strategy.

Authors of stages import from `pipeline.artifacts`, `pipeline.contracts.engine`, `pipeline.contracts.stage`,
`pipeline.errors` and `pipeline.testing`.
"""
