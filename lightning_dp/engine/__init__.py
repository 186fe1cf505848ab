"""One training step: gradients into flat buckets, one asynchronous all-reduce a bucket. Torch only."""
