"""Rendering of templates to Python: the loader of all templates, and wrapping of long lines.

The rooms above, `kernels` and `codegen`, pass typed values to templates.
"""
