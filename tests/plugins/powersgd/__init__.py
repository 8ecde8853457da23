"""A strategy as a plugin, written from docs/writing-a-stage.md: its stage, and its engine."""
