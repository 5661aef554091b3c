"""The Early Signature: what the first steps of a run tell about it."""
