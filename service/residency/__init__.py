"""The residency catalogue: how much of which namespace lies in which tier of which node."""
