"""Tenants, their principals, groups and memberships."""
