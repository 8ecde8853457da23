"""LLaMA-Factory's YAML recipes (`llamafactory-cli train`), as of version 0.9.5."""
