"""Findings: what was learned that will cost accuracy in FP8, and what helps; drift since then."""
