"""The strategy's names in Lightning's registries."""
