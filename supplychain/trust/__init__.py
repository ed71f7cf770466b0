"""Who may sign, and what makes a signature valid: bundles, signers, trusted keys and roles, verification."""
