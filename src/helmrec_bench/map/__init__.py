"""The map of where adapting the split pays: cells, loads, shifts."""
