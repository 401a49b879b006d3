"""Programs and workers that tests start in processes of their own."""
