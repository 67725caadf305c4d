"""A run that was saved, for programs that use its model: found, loaded, exported.

Read `finding` first, then `export`.
"""
