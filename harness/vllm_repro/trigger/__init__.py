"""Conditions that must hold inside the engine for a trial to count, and their arithmetic."""
