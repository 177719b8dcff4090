"""Compares time and memory with a plain gradient, with other libraries, and with a lower bound."""
