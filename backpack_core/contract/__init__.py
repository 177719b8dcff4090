"""What authors derive from: rules, losses, products, propagators, extensions.

Imports torch, ``record`` and ``graph``; never an engine, a registry or a plugin.
"""
