"""Datasets: batches that depend on the number of the step alone.

For text read `datasets` first, then `packing`. For images read `examples`, then `glyphs`; `images` reads a folder.
"""
