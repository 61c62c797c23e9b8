"""Scripts that the peers' own interpreters run. They import nothing of ours."""
