"""Frozen scenarios as TOML files; those of the evaluation alone are in `evaluation/`."""
