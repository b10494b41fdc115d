"""How experiments are run: one simulated run, tiers, finished pieces, where results come from."""
