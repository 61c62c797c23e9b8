"""Who may do what, and the signed statements that carry the answer: rules, decisions, grants."""
