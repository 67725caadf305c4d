"""The directory of a run, how the run was started, and how it ends.

Read `directory` first, then `failures`. `files` has the name of every file that a run writes, and
`bounded_files` reads such files, also those that other programs wrote.
"""
