"""Findings: causes of lost accuracy in FP8, with remedies; drift since the profile was made."""
