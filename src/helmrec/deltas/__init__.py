"""Row deltas: an ordered stream of new embedding rows from training, and how an engine follows it."""
