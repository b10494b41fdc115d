"""What steps cost on the present device: timed on a real engine, fitted to the terms the simulator reckons with."""
