"""Engine adapters: each speaks its engine's interface above and the sidecar's socket below."""
