"""Use trained encoders: embed images, export models, show neighbours."""
