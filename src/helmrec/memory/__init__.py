"""The pool and its two caches: bookkeeping without torch, the one tensor it describes, and rows tracked on a card."""
