"""Loads and saves between staging and the store, and the slots of a connection."""
