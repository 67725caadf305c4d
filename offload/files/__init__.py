"""Frozen weights that stay in their files and are read in every step.

Read `mapped_files` first, then `file_ring`.
"""
