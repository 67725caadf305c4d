"""One run on several devices: a process for each, which is called a rank. Rank 0 decides, the others follow.

Read `ranks` first, then `group` and `follow`.
"""
