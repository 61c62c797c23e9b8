"""Revocations: asked for, committed, in force everywhere within one lease."""
