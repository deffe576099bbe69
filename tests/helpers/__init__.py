"""Helpers of several tests: federations on disk, grids in one thread, deployments, pages of the documentation."""
