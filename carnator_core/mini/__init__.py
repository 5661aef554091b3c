"""The embedded text-to-video model: its world, codec, text encoder, transformer, training and judge."""
