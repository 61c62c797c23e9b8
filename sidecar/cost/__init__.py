"""Restore, recompute, or restore a part: what is known of costs, and the decision."""
