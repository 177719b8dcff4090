"""The autograd graph: its nodes, ways through it, and what is seen from above.

Imports torch and ``record`` only; rules are asked through the calls that carry them.
"""
