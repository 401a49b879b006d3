"""From a policy to its plan: sites resolved, owners traced, kernels selected, modules bound."""
