"""The classes that authors of plugins derive from: rules, losses, propagators, extensions and more.

A rule can be written and tested against these classes alone, since they know no engine, registry or
plugin. Imports torch, ``record``, ``graph``, ``discovery`` and ``errors``.
"""
