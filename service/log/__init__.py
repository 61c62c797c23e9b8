"""The invalidation log: one counter row, a signed hash chain, pages and a stream of it."""
