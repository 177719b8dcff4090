"""What is known of a forward pass: calls, their places in the graph, what a rule sees of them.

Imports torch and ``errors`` only.
"""
