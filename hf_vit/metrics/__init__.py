"""`evaluate` modules, loaded by their local path, so that no metric needs the network."""
