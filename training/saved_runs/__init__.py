"""A run that was saved, for programs that use its model. Read `finding` first, then `export`."""
