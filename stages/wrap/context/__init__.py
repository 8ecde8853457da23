"""Context parallelism: ranks share the tokens of every sample."""
