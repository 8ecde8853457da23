"""Hugging Face's Trainer and accelerate as stages, and the Trainer's checkpoints."""
