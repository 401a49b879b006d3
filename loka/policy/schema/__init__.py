"""The schema of a policy, and its errors in the terms of policies."""
