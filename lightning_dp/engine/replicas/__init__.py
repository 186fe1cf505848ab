"""Replicas are equal: at the start, and ever after."""
