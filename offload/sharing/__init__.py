"""The processes that share the homes of a model: their protocol, their memory, exchanges and links between devices.

Read `sharers` first.
"""
