"""Pipeline parallelism: ranks hold consecutive layers, and pass micro-batches on."""
