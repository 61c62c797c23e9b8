"""The verdict on one request: its grant, its chain of keyed ids, and how much of it is stored."""
