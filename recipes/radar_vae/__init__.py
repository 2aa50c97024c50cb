"""A 3D VAE for radar voxels, and latent diffusion in its latent space."""
