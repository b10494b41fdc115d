"""Examples that use the package from outside."""
