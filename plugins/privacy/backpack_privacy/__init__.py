"""Differentially private training with individual gradients."""
