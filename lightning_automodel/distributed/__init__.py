"""Process groups, the store, meshes and collectives."""
