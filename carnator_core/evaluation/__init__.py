"""Measuring reuse: traces (who asks for what), methods (who answers), metrics (how near, how right), one harness.

`bench.py` is the harness and its command; whatever is measured later extends these files.
"""
