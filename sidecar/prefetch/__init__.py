"""Bringing blocks from NVMe into host memory before a load asks for them."""
