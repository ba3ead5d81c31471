"""Threads over tiles, and locks that survive a fork."""
