"""Training of draft heads: what a target wrote (`corpus`), what it computed of it (`features`), losses, heads, the loop."""
