"""Certificates of revocation."""
