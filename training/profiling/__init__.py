"""Describes the hardware of a run, and records one step as a trace and a picture.

Read `hardware` for the device and its memory, `trace` and then `timeline` for the picture.
"""
