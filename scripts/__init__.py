"""Measurements and generators; not part of the package."""
