"""Mods: changes to a model, or to the computation of its forwards, that make more of it safe and fast in FP8.

Each mod has a folder: `MOD.py` applies it and needs only torch, `MOD_planning.py` has its policy schema, finds its work
in a model, and describes it. `registry` lists the mods; shared code is beside it.
"""
