"""Options of running each site, what they cost, and the choice among them."""
