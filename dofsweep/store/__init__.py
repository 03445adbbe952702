"""The results store: typed models, sessions, the repository that writes, queries that read."""
