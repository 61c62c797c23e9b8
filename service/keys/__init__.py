"""Component secrets and the key-encryption keys that wrap them."""
