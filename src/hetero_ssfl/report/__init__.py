"""Run folders as tables and pictures."""
