"""The profile: what planning reads of each site, and its file."""
