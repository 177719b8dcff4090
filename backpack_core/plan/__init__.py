"""What is decided about a backward pass once for all passes of its structure.

``structure.py`` recognises a graph, ``plan.py`` keeps what was found out about one like it, and
``numbers.py`` writes that down without nodes.
"""
