"""The relay: which signals are worth computing ahead, who holds what until its rank, and the chunks between."""
