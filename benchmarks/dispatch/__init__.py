"""Dispatch against every single library on 27 regions: plans, measurement and tables."""
