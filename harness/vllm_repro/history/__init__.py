"""The history of runs: rows made from reports, the store that keeps them, and what the nights say when they are read together."""
