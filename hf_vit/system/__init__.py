"""What lies under everything: the machine, its files, and text of strangers."""
