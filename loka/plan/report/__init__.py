"""Reports of plans: rows, explanations, differences, with the same wording everywhere."""
