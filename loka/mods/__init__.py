"""Mods: changes to a model, or to the computation of its forwards, that make more of it safe and fast in FP8.

Each mod is a file: in `modules` those that change modules, which need torch alone, in `rewriting` those that rewrite
forwards. `registry` lists them, `mod_settings` has what a policy writes about each; shared code is beside it.
"""
