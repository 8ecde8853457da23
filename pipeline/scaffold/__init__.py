"""New plugin packages: files to begin with, which work as they are."""
