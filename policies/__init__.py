"""Policy files that ship with secure-train, as package data."""
