"""The sections of a config, by subject (data.py, learning.py, federation.py). Each is a frozen pydantic model."""
