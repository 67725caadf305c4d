"""Gradients, from where backward makes them to their homes, to the sum of several processes, or to their updates.

Read `landing` first, then `offloader`. `seams` has the interface to an optimizer that updates weights beside the step.
"""
