"""Describes the `hardware` of a run, and records one step as a trace and a picture (`timeline`)."""
