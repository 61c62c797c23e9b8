"""The copy of the log that lies outside the database, and what start-up does with it."""
