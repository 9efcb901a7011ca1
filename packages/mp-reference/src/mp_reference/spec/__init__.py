"""Facts: published numbers and rules as frozen rows, each with its source, in the standard library only.

This is the one part of mp_reference that mp_torch may import. A row never computes with arrays.
"""
