"""One node behind HTTP: the front, and the port through which it reaches an engine."""
