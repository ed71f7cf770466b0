"""Bills of materials (CycloneDX): of an environment, a dataset, a model."""
