"""Search of the smallest set of flags that crashes: `minimize`."""
