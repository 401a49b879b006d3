"""The schema of a policy, and its errors in a policy's own words."""
