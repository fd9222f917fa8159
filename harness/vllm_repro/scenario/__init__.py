"""One upstream bug as a declaration: vocabulary, reader, checks, catalogue."""
