"""Everything that imports ray: the local cluster, jobs, actors and trainers."""
