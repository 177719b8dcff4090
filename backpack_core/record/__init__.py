"""What is recorded of a forward pass: calls, their places in the graph, and what rules see of them.

Everything else reads the record and none of it writes here, so it imports torch and ``errors``
only.
"""
