"""The append-only record of a run, and the removal of secrets and private names."""
