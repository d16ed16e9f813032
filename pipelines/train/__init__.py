"""Training of the embedded avatar: synthetic talking-head data, autoencoder, denoiser.

May import `rtgen`, `decoders` and `pipelines`. Needs the `train` extra (scipy, moderngl, pillow);
nothing outside this package imports it at serving time.
"""
