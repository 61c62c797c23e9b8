"""The socket: who may open a session, its frames, and what engines and gateways ask."""
