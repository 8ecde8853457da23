"""One run: its folder, its journal, its slots in order, and what a resume repeats."""
