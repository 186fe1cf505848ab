"""Side-by-side measurements; see each module."""
