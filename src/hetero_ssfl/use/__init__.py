"""What a user does with trained encoders: embed images, export, look at neighbours."""
