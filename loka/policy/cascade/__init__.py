"""Rules in order, field by field: the settings of each site, with who set what."""
