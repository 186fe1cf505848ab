"""How a bucket travels."""
