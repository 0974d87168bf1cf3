"""Long runs over a real server, and their short forms."""
