"""One simulated node: the scheduler, pool and caches of an engine, reimplemented as compiled loops."""
