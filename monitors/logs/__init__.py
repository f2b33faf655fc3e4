"""Log lines: known failure signatures as data, and the scanner that finds them."""
