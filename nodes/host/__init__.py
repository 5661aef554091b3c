"""The glue to ComfyUI."""
