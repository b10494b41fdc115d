"""One simulated node: a compiled twin of scheduler, pool and both caches of an engine."""
