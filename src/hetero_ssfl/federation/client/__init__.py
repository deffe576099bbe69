"""The participant's side: a Flower ClientApp, and the state that its process keeps between messages."""
