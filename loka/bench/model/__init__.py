"""Whole steps of a policy's own model in every variant, as training and serving loops run them; no graph comes first.

`model_run` has the measurement, `model_variants` what is compared, `whole_step` what a step is, `model_report` the
tables.
"""
