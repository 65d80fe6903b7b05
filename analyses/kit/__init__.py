"""What analyses share, and all that they may import."""
