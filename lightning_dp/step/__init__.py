"""One training step in the Trainer's life."""
