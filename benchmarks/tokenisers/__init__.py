"""Ways to tokenise a file, and the files."""
