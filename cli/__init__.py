"""The `strongroom` command: one module a verb."""
