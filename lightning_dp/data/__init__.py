"""Which rank sees which sample: orders, shares of ranks, loaders, and the state that a checkpoint holds."""
