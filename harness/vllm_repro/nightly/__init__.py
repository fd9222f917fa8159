"""The nightly job: every scenario that this machine can run, at one release, and one answer for all of them."""
