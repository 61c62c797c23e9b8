"""Suites about the control plane: policy, keys, revocation, audit. Rows go into control.json."""
