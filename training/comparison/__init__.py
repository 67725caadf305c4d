"""Compares runs: a table, three figures and a page.

Read `report` first, then `runs` (what is read of each run) and `rows` (runs averaged over their seeds).
"""
