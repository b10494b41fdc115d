"""What is simulated on traces. No torch here: everything decides, nothing acts on a device."""
