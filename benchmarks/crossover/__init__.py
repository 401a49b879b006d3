"""Where FP8 starts to win over BF16, by M, K and N: from recorded parts, as tables and as a plot."""
