"""Measurements of the simulator, and of what is decided in it."""
