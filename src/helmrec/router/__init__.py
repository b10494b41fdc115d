"""Which node serves a request: pure decisions over small values, for the simulator and for a real cluster alike."""
