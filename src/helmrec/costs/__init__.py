"""Milliseconds of a step from its work: learned from a node's own steps, or calibrated on a device."""
