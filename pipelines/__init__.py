"""Sessions built and conditioned, media files, training. May import `rtgen` and `decoders`."""
