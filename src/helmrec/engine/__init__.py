"""The single-node engine: requests in, scores out, one step at a time."""
