"""Training by a policy, alone or in paired runs: loss, normalised entropy, AUC."""
