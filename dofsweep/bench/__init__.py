"""Measurements of teachers and students."""
