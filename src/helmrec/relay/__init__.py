"""Pre-inferred prefixes: which signals are worth computing ahead, and who holds what until its rank. Pure."""
