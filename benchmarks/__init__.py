"""Ratios against the hardware: ours and the reference in one run, medians with their spread."""
