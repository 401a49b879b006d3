"""Measuring parts on this machine's GPU, into the file that plans are priced by."""
