"""Where ciphertext lives: one protocol, one contract suite, several tiers."""
