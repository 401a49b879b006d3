"""Time kernels on this machine's GPU and record them for the latency model of plans."""
