"""Teachers: find and load them, see their queries and keys, and take their attention's place."""
