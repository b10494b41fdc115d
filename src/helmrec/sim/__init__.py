"""Simulation of nodes and clusters on traces of traffic, without torch and without a device."""
