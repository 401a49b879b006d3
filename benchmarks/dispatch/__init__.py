"""Dispatch against every single library on 27 regions: the plans, their measurement, and the tables."""
