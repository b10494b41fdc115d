"""Measurements of engines and servers on a CPU."""
