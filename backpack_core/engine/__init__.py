"""What happens in a backward pass: who is visited when, and where quantities and results go.

The engine knows no layer and no quantity; it asks rules and propagators.
"""
