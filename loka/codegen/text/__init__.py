"""Python as text: identifiers, comments, and line breaks as in ruff's format."""
