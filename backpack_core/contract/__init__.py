"""What authors of plugins derive from: rules, losses, products, propagators, extensions.

The contract knows no engine, no registry and no plugin, so a rule can be written, and tested,
against these classes alone. Imports torch, ``record`` and ``graph``.
"""
