"""Norms over fixed blocks of the features, without mean and parameters."""
