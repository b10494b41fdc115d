"""Commands that this package adds to `helmrec`."""
