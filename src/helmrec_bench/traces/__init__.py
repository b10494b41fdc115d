"""Statistics of traces beside published ones."""
