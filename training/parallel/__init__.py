"""One run on several devices: a process for each, its rank. Read `ranks` first, then `group`."""
