"""Ratios against the hardware and the peers: ours and the reference in one run, in turn."""
