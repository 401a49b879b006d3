"""A norm that only tests have, torch.nn.functional.normalize: it goes where CONTRIBUTING.md says, in a copy of LoKA."""
