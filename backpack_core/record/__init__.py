"""What is known of a forward pass: calls, where they sit in the graph, and what a rule sees of them.

Imports torch and ``errors`` only.
"""
