"""Rules, role assignments and test cases of each tenant, by version, as rows."""
