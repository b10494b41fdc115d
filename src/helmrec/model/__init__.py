"""HSTU ranking models: their shape, their weights on disk, their arithmetic."""
