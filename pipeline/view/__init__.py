"""What people see of a run: its folder, read by other processes than the one that trains."""
