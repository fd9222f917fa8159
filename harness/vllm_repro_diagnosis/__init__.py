"""Reading server logs and pasted tracebacks: what died, of what, in which phase, and whether it is a known bug. Pure."""
