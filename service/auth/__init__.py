"""Who is calling: tokens, actors, and the one place where tenant scope is applied."""
