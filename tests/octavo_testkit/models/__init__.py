"""Small models with random weights, and folders and files as checkpoints come in."""
