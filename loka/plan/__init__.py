"""Makes the plan of a policy: sites resolved, owners traced, kernels selected, modules bound."""
