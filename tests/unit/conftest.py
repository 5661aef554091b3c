"""Property tests are judged by what they assert, never by how long a shared machine takes over them."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
