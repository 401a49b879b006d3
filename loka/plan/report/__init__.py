"""A plan for people: rows, explanations, differences, in the same words everywhere."""
