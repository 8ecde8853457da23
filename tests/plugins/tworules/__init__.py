"""An optimizer of two rules as a plugin, written from docs/writing-a-stage.md."""
