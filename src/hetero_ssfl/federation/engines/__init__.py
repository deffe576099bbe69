"""Engines that carry messages between server and clients on one machine: worker processes, or Ray."""
