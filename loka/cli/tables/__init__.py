"""Tables and lines that several verbs print."""
