"""The record of a forward pass: calls of modules, their sites in the autograd graph, and views.

A view is what a rule sees of a call. All other rooms read the record, and none of them writes to
it. This room imports torch, ``_torch``, ``errors`` and ``remember`` only.
"""
