"""Ciphertext at rest and in motion: envelope, key ring, lifecycle, tiers, transfers, recovery."""
