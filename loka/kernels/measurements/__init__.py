"""Times and errors of parts: files, look-up, and what lies between measured sizes."""
