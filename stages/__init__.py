"""The built-in stages, registered by entry point exactly as a third party's are."""
