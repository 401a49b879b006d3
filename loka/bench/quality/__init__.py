"""Training as a policy describes it, alone or in pairs: loss, normalised entropy, AUC."""
