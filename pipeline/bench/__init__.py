"""Short runs of one recipe under several strategies and numbers of processes, compared."""
