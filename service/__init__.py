"""The control plane: tenants, registry, keys, policy, grants, leases, revocation, audit."""
