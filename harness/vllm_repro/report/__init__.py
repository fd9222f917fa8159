"""Reports: renderings of a journal, each a pure function of `RunReport`."""
