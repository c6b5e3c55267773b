"""Looking inside: what the world model expects and reads, what the bits of a token are, and pictures of both."""
