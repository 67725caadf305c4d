"""The directory of a run, how it was started and how it ends. Read `directory` first, then `failures`."""
