"""The participant's side: a Flower ClientApp, and what its process keeps between two messages."""
