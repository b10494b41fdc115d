"""Traces of real and synthetic traffic: published logs imported, statistics beside published ones, pictures."""
