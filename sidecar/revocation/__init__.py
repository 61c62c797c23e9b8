"""Following the invalidation log, and what an entry does here, at once and afterwards."""
