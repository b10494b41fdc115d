"""Measurements of the controller, simulated and live."""
