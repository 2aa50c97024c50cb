"""A 3D AutoencoderKL on medical volumes, with a discriminator and a perceptual loss, from one YAML file."""
