"""The lab: a real release on the CPU whose CUDA parts are replaced by a plugin that names each of them."""
