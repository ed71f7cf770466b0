"""The training environment: its lock, how it is built, and how it is verified from outside. An empty face,
free to import.
"""
