"""The page of `loka report`: values gathered from a plan, its profile and kept runs, written as HTML or Markdown.

`gather` makes a `Report`; `html_page` and `markdown_page` write one. `geometry` has what charts need of arithmetic.
"""
