"""Each tenant's policy: versions, documents, tests, dry runs, and the decisions that follow."""
