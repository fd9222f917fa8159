"""The reported command of an issue: parsed from whatever was pasted, edited, and rendered back.

Pure.
"""
