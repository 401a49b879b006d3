"""Hard Swish in place of SiLU and of the sigmoids of SwishNorms."""
