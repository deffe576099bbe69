"""The server's side: the loop over rounds, who is connected, the saved state, and what is told of it."""
