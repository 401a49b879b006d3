"""Models as policies name them: built, with example inputs, and copied."""
