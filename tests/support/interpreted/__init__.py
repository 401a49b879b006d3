"""Programs that run rendered kernels in Triton's interpreter, each in a process of its own (`python -m`)."""
