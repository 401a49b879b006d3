"""Shared by tests of several folders: cases, models, made-up costs, programs of other processes.

A test imports from here as `from tests.support.X import Y`; what one folder alone needs stands in its conftest.py.
"""
