"""Datasets: text to tokens to batches that depend on the step's number alone. Read `datasets` first, then `packing`.

Of images, `examples` first, then `glyphs`; `images` reads a folder, `image_column` streams a dataset.
"""
