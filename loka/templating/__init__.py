"""Templates in, Python text out: one loader of every template, and one wrapper of lines that came out too long.

What a template says is the business of the rooms above: `kernels` and `codegen` give it typed values.
"""
