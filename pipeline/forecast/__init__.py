"""What a recipe will need on given hardware, by arithmetic alone. Importing this imports no torch."""
