"""axolotl's YAML recipes, as of version 0.19."""
