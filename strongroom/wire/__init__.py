"""The socket protocol between an engine and its sidecar: framing and frames."""
