"""A discrete-event simulation of engine, link, disk and tiers around the production decisions."""
