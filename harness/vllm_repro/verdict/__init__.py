"""Outcome of a trial, result of an arm, verdict of a scenario, and their statistics."""
