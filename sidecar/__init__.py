"""The process beside each engine: socket, sessions, invalidation follower, leases, audit spool."""
