"""Policies that decide where the boundary between the two caches should be. They see numbers, never tensors."""
