"""Reports of runs as single HTML files that load nothing else."""
