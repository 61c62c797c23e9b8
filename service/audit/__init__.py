"""The audit trail: an append-only hash chain, a Merkle tree over it, and its questions."""
