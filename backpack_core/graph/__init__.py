"""What is known of the autograd graph: its nodes, ways through it, and where samples lie.

Imports torch and ``record`` only; rules are asked through the calls that carry them.
"""
