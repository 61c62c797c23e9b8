"""What is looked at once a second, and what comes of it: pressure, breakers, the stance."""
