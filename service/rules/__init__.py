"""Policy rules of each tenant, and decisions over them."""
