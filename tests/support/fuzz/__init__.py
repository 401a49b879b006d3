"""The fuzzer of tests/fuzz: odd documents and damaged files, what reads them, and what has to hold for each."""
