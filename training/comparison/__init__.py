"""Compares runs: a table, three figures and a page. Read `report` first, then `runs` and `rows`."""
