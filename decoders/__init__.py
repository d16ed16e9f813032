"""Frame decoders: latents to pixels, one latent frame at a time. May import `rtgen`."""
