"""Sidecars as the service sees them: enrolment, proofs, leases, acknowledgements, intake."""
