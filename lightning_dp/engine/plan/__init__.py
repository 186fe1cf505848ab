"""Which gradients travel together."""
