"""The commands of `pipe`, one module each, imported only when used."""
