"""secure-train: the gate, and what it judges. Importing this package costs nothing: both environments hold it."""
