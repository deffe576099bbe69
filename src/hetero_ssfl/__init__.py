"""Federated self-supervised learning for clients that differ in data and architecture."""

__version__ = "0.1.0"
