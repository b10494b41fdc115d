"""How runs are compared: paired seeds, one scenario for all policies, tables of scores."""
