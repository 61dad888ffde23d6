"""Files: whole or not at all, resumable, and read from any format."""
