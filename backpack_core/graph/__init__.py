"""The autograd graph of one backward pass: names of its nodes, its parameters, and a survey of it.

Imports torch, ``errors`` and ``record`` only; layer rules are reached through the calls.
"""
