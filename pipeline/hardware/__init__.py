"""GPUs by their data sheets, and what this machine has."""
