"""Hard swish in the places of SiLU and of the sigmoids of SwishNorms."""
