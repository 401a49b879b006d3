"""The page of `loka report`: values gathered from a plan, its profile and kept runs, written as HTML or Markdown.

`page` gathers a `Report` and writes it as HTML, `markdown_page` is the other. `geometry` has what charts need of
arithmetic.
"""
