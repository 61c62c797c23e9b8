"""Grants: signed capabilities for namespaces, decided in one snapshot."""
