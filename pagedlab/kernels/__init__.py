"""The Triton kernels, one file each, every launcher under its kernel."""
