"""Rules in order, field by field: the settings of each site, with the source of each."""
