"""Datasets: text to tokens, and tokens to batches that depend on the step's number alone.

Read `datasets` first, then `packing`. `corpus` and `local_files` read local text.

For images, read `examples` first, then `glyphs`. `images` reads a folder, `image_column` streams a dataset; both decode
with `pictures`.
"""
