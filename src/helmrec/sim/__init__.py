"""Workloads, traces and what is simulated on them. No torch here: everything decides, nothing acts on a device."""
