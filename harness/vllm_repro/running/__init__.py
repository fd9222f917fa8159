"""One trial, one run: boot, workload, watch, measure."""
