"""The pool and its two caches: bookkeeping that never imports torch, and the one tensor it describes."""
