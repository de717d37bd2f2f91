"""What travels between client and server."""
