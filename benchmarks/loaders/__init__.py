"""Ways to bring a model's weights into the ranks."""
