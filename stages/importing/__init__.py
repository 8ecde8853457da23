"""Translators of other tools' configuration files. Nothing here imports torch or those tools."""
