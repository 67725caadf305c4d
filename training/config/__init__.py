"""The configuration: types, ranges, rules, help, and the objects that options describe.

Read `schema` first, then `validation`. `modes` finds the offload modes, `construct` makes them.
"""
