"""A class-conditional diffusion UNet whose attention looks at the outer product of the class embedding with itself."""
