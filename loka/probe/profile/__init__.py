"""The profile: the data about each site that planning reads, and its file."""
