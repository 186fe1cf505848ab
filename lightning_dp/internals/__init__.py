"""Every name of Lightning, Hydra and torch that is not public, one small function each."""
