"""A pixel loss that flows back through a frozen image decoder."""
