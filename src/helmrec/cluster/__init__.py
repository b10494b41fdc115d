"""Many engines behind one HTTP API: what Ray Serve runs, and the little of ours that knows Ray."""
