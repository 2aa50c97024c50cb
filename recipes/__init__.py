"""Five training programs that ran out of memory, as their authors ran them and as memfit fits them."""
