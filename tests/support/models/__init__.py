"""Models under test; policies of tests name them as tests.support.models.X:build."""
