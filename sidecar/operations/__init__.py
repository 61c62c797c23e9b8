"""The operator's door: metrics, health, state, events, and clearing a breaker."""
