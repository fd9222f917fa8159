"""Search of the shortest prompt that crashes: `threshold`."""
