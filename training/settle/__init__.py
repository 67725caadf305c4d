"""Settles a configuration: chooses each value that is `auto`, once, with its reason. Everything after it only reads.

Read `settled` first, then `components`.
"""
