"""The processes that share the homes of a model: their protocol, their memory, their exchanges of a few numbers.

Read `sharers` first.
"""
