"""Pipelines that build and condition sessions, media files, training. May import `rtgen` and `decoders`."""
