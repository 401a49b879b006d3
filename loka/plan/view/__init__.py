"""The view of a plan, which every table, page and `--json` shows: its sites, its coverage, one site, two plans."""
