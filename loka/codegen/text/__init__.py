"""Python as text: identifiers, comments, and lines as ruff lays them out."""
