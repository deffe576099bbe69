"""What several tests need: federations on disk, grids in one thread, real rehearsals, pages of the documentation."""
