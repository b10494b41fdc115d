"""Many engines behind one HTTP API, run by Ray Serve."""
