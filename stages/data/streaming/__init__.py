"""The live half of data.stream: its order, its shards, and their tokens."""
