"""Data in a Trainer's life: who gets which sample, exact evaluation, resume on any number of ranks."""
