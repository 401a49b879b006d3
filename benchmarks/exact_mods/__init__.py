"""What each mod that rewrites forwards gains on a few linears, measured on a GPU."""
