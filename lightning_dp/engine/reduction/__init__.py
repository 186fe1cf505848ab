"""One backward that reduces."""
