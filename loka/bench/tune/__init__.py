"""Measures the candidate plans of a policy's model end to end, and keeps the fastest in a record beside the policy."""
