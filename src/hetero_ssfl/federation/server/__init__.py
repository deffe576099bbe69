"""The server's side: the loop over rounds, the connected nodes, the saved state, and the status and figures."""
