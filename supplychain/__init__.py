"""secure-train: the gate, and what it judges. Importing it costs nothing: both environments have it."""
