"""What a step cost: statistics, and a callback that logs them."""
