"""Helpers of several tests: federations on disk, grids in one thread, rehearsals, pages of the documentation."""
