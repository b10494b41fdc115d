"""Measure the cost of steps on a real engine, and fit the cost terms of the simulator to them."""
