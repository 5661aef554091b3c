"""Property tests are judged by what they assert, never by how long a shared machine takes over them, and a commit is
judged by the same examples each time."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
