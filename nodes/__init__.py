"""The nodes: schema, tooltips and a call into the core, one file each; `host/` holds the glue to ComfyUI."""
