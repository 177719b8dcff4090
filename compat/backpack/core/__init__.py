"""Derivatives of layers, under the names of :mod:`backpack.core.derivatives`."""
