"""The page of `loka report`: values gathered from a plan, its profile and kept runs, written as HTML.

`page` gathers a `Report` and writes it, `tables` has what a plan says in rows. `geometry` has what charts need of
arithmetic.
"""
