"""What kernels can take along: linear chains, interactions, norms behind concatenations, cross layers."""
